// The head of the page, its sections in the order in which they are told, the theme, and paper.

/** A sentence in which each named attempt wears its colour. */
function sentence(text, load) {
  const names = load.series.map((line) => line.name).sort((a, b) => b.length - a.length);
  const pieces = [];
  let plain = "";
  for (let at = 0; at < text.length;) {
    const name = names.find((one) => text.startsWith(one, at) && !/[\w.-]$/.test(text.slice(0, at)) && !/^[\w-]/.test(text.slice(at + one.length)));
    if (!name) {
      plain += text[at++];
      continue;
    }
    const one = attempts.get(load.series.find((line) => line.name === name).id);
    pieces.push(plain, el("span", { class: `named ${look(one).name}` }, name));
    plain = "";
    at += name.length;
  }
  return el("p", {}, ...pieces, plain);
}

function tile(value, unit, label, extra) {
  return el("div", { class: "tile" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value, unit ? el("small", {}, ` ${unit}`) : null), el("div", { class: "note" }, extra ?? ""));
}

function countOf(kind) {
  return data.attempts.filter((one) => one.kind === kind).length;
}

function tiles() {
  const found = [];
  const load = data.loads[0];
  if (load) {
    const reached = load.levels.filter((level) => load.best[level]);
    const ends = [...new Set([reached[0], reached[reached.length - 1]])].filter((level) => level !== undefined);
    for (const level of ends) {
      const best = load.series.find((line) => line.name === load.best[level]);
      found.push(tile(number(best.levels[level].tok), "tok/s", `Best at C=${level}`, [swatch(attempts.get(best.id)), best.name]));
    }
  }
  const bad = countOf("bad");
  found.push(tile(number(data.attempts.length), "", "Attempts", `${countOf("good")} came up, ${bad} crashed`));
  if (data.releases.length) found.push(tile(number(data.releases.length), "", "Releases with patches", data.hosts.map((host) => `${several ? `${host.name}: ` : "now "}${stack(host.patches)}`).join(", ")));
  return el("div", { class: "tiles" }, found);
}

function lead() {
  const load = data.loads[0];
  const said = load?.headline.length ? load.headline.map((text) => sentence(text, load)) : [el("p", {}, data.attempts.length ? `${plural(data.attempts.length, "attempt")}: ${countOf("good")} came up, ${countOf("bad")} crashed` : "Nothing launched yet")];
  const versions = [...new Set(data.hosts.map((host) => `${host.package} ${host.version ?? ""}`.trim()))];
  return el(
    "div",
    { class: "lead" },
    el("p", { class: "over-line" }, `${versions.join(", ")} · ${data.hosts.map((host) => host.name).join(", ")} · ${day(data.at)} ${new Date(data.at).getFullYear()}, ${clock(data.at)}`),
    el("h1", {}, said),
    load ? el("p", { class: "note" }, `Output tokens per second. ${loadName(load)}.`) : nothing("No throughput curve yet. Measure a running server with", data.benchCommand),
    tiles(),
  );
}

function memory(mib) {
  return mib ? `${Math.round(mib / 1024)} GiB` : "";
}

function hostCard(host) {
  const cards = host.gpus.map((gpu) => `${gpu.count} × ${gpu.name}${gpu.mib ? `, ${memory(gpu.mib)}` : ""}`);
  return el(
    "div",
    { class: "card host" },
    el("h3", {}, host.name),
    el("dl", {},
      el("dt", {}, "GPUs"), el("dd", {}, cards.join("; ") || "none found"),
      el("dt", {}, "Engine"), el("dd", {}, `${host.package} ${host.version ?? "(not found)"}`),
      el("dt", {}, "Release"), el("dd", {}, host.release ? `${host.release} (${host.patches.join(" + ") || "base"})` : "base"),
      el("dt", {}, "Attempts"), el("dd", {}, String(host.attempts))),
    host.busy ? el("p", { class: "note" }, String(typeof host.busy === "string" ? host.busy : "a push is in progress")) : null,
    host.problems.map((problem) => el("p", { class: "problem" }, problem)),
  );
}

function failedCard(failure) {
  return el(
    "div",
    { class: "card host failed" },
    el("h3", {}, failure.host),
    el("p", { class: "problem" }, `${failure.status}: ${failure.error?.message ?? ""}`),
    el("p", { class: "note" }, "This report lacks its attempts."),
    failure.error?.hint ? el("p", { class: "note" }, failure.error.hint) : null,
  );
}

function hostSection() {
  return section("hosts", "Hosts", null, el("div", { class: "grid" }, data.failures.map(failedCard), data.hosts.map(hostCard)));
}

const warned = data.failures.length
  ? el("aside", { class: "care alarm" }, el("b", {}, `${data.failures.map((one) => one.host).join(", ")} could not be asked`), ` (${data.failures.map((one) => one.status).join(", ")}): what ran there is missing here.`)
  : null;

document.getElementById("report").replaceChildren(...[
  warned, lead(), curvesSection(), crashSection(), timeSection(), loadSection(), releaseSection(), tableSection(), hostSection(),
  el("footer", { class: "note" }, `Made by deployctl ${data.version} with `, el("code", {}, data.command), `. Charts: Chart.js ${Chart.version}, MIT licence, (c) Chart.js Contributors.`),
].filter(Boolean));
document.title = `deployctl report: ${data.hosts.map((host) => host.name).join(", ")}`;

// -- theme and paper --------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = document.getElementById("theme");

function isDark() {
  return (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
}

function themed() {
  theme.textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-label", `Show in ${isDark() ? "light" : "dark"} colours`);
  drawAll();
}

theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  themed();
});
dark.addEventListener("change", themed);

// On paper everything is light and open, but the diffs that nobody opened.
const opened = [];
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  for (const one of document.querySelectorAll("#crashes details:not([open])")) {
    one.open = true;
    opened.push(one);
  }
  drawAll();
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("paper");
  for (const one of opened.splice(0)) one.open = false;
  drawAll();
});

themed();
