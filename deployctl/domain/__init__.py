"""Values and pure functions: hosts, patches, launches, playbooks, reports. Nothing here touches a network or a host."""
