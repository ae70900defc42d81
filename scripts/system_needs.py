"""What the tests need of the system: OpenSSH, fuser, fish, tcsh, git and Chromium. Installed where apt can."""

import os
import shutil
import subprocess
import sys

NEEDS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-agent": "openssh-client",
    "fuser": "psmisc",
    "fish": "fish",
    "tcsh": "tcsh",
    "git": "git",
    "ps": "procps",
    "chromium": "chromium",
}


def main() -> None:
    """Install what is missing, or say how."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = sorted({package for program, package in NEEDS.items() if not shutil.which(program, path=path)})
    if not missing:
        return
    if not shutil.which("apt-get"):
        sys.exit(f"the tests need: {' '.join(missing)} (install them with this system's package manager)")
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    subprocess.run([*prefix, "apt-get", "update", "-qq"], check=True, env=environment)
    install = [*prefix, "apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    subprocess.run(install, check=True, env=environment, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
