// Crashes with the line of the patch that they passed through, and the patches themselves.

const MOST_SEEN = 8;

/** The attempts of a card, the newest of them, as links into the table. */
function seen(ids) {
  const links = ids.slice(-MOST_SEEN).map((id) => {
    const one = attempts.get(id);
    return el("a", { href: `#row-${one.id}`, class: "tag", title: `${one.words}, ${when(one.at)}` }, one.name);
  });
  const left = ids.length - links.length;
  return el("span", { class: "seen" }, left ? `${number(left)} earlier and ` : "", links);
}

/** A file from its package on: the folders above say nothing new in every line. */
function tail(path) {
  const at = path.search(/(site-packages|dist-packages)\//);
  if (at >= 0) return path.slice(at).replace(/^[^/]*\//, "");
  const parts = path.split("/");
  return parts.length > 5 ? `…/${parts.slice(-4).join("/")}` : path;
}

function frame(one) {
  return el(
    "li",
    { class: one.patch ? "patched" : null },
    el("div", { class: "place" }, `${tail(one.file)}:${one.line}`, el("span", {}, ` in ${one.function}`), one.patch ? el("b", {}, one.patch) : null),
    one.text ? el("code", {}, one.text) : null,
  );
}

function frames(card) {
  if (!card.frames.length) {
    return card.tail.length ? [el("h4", {}, "Last lines of the log"), el("pre", { class: "tail" }, card.tail.join("\n"))] : [];
  }
  const inner = card.frames.filter((one) => !one.outer);
  const outer = card.frames.filter((one) => one.outer);
  return [
    el("h4", {}, "Frames, innermost last"),
    outer.length ? el("details", {}, el("summary", {}, `${plural(outer.length, "frame")} further out`), el("ol", { class: "frames" }, outer.map(frame))) : null,
    el("ol", { class: "frames" }, inner.map(frame)),
  ];
}

function patchedLine(found) {
  if (!found) return el("p", { class: "note" }, "It passes through no line of a patch.");
  return el(
    "div",
    { class: "culprit" },
    el("div", { class: "place" }, el("b", {}, found.patch), ` ${found.file}:${found.line}`),
    el("code", {}, found.text),
    found.exact ? null : el("p", { class: "note" }, "In a file that the patch changed, but not in its lines."),
  );
}

function crashCard(card, place) {
  return el(
    "article",
    { class: "card crash", id: `crash-${place}` },
    el("div", { class: "what" },
      el("h3", {}, card.cause),
      el("p", { class: "note" }, `Ended by ${card.ending}. Seen in ${plural(card.attempts.length, "attempt")}: `, seen(card.attempts)),
      el("h4", {}, "Patched line"),
      patchedLine(card.patched),
      card.log ? el("p", { class: "note path" }, card.log) : null),
    el("div", { class: "frames-box" }, frames(card)),
  );
}

const CARDS_AT_FIRST = 4;

function crashSection() {
  if (!data.crashes.length) return section("crashes", "Crashes", null, nothing("None of these attempts crashed."));
  const total = data.attempts.filter((one) => one.cause !== null).length;
  const kinds = data.crashes.length;
  const cards = data.crashes.map(crashCard);
  const rest = cards.slice(CARDS_AT_FIRST);
  return section(
    "crashes",
    "Crashes",
    `${plural(total, "attempt")} crashed${kinds < total ? ` in ${plural(kinds, "way")}` : ""}. Newest first, those outside of patches last.`,
    ...cards.slice(0, CARDS_AT_FIRST),
    rest.length ? el("details", { class: "rest" }, el("summary", {}, plural(rest.length, "further kind of crash", "further kinds of crash")), rest) : null,
  );
}

// -- patches ----------------------------------------------------------------------------------------------------------

function counted(diff) {
  let added = 0, removed = 0;
  for (const text of diff.split("\n")) {
    if (text.startsWith("+") && !text.startsWith("+++ ")) added++;
    if (text.startsWith("-") && !text.startsWith("--- ")) removed++;
  }
  return [added, removed];
}

/** {file: {line: [names of attempts]}} of the crashes that passed through lines of this release. */
function crashedLines(release) {
  const ran = new Set(release.where.flatMap((where) => where.attempts));
  const found = {};
  for (const { patched, attempts: ids } of data.crashes) {
    const names = ids.filter((id) => ran.has(id)).map((id) => attempts.get(id).name);
    if (!patched || !names.length) continue;
    const lines = (found[patched.file] ??= {});
    lines[patched.line] = [...(lines[patched.line] ?? []), ...names];
  }
  return found;
}

function diffOf(release) {
  const crashed = crashedLines(release);
  const box = el("div", { class: "diff" });
  let file = "", old = 0, now = 0, inHunk = [0, 0];
  for (const text of release.diff.replace(/\n$/, "").split("\n")) {
    const hunk = /^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@/.exec(text);
    let kind = "same", at = "";
    if (hunk) {
      [old, now] = [Number(hunk[1]), Number(hunk[3])];
      inHunk = [Number(hunk[2] ?? 1), Number(hunk[4] ?? 1)];
      kind = "hunk";
    } else if (inHunk[0] <= 0 && inHunk[1] <= 0) {
      kind = "file";
      if (text.startsWith("+++ ")) file = text.slice(4).replace(/^b\//, "").split("\t")[0];
    } else if (text.startsWith("+")) {
      [kind, at] = ["add", now++];
      inHunk[1]--;
    } else if (text.startsWith("-")) {
      [kind, at] = ["del", old++];
      inHunk[0]--;
    } else if (!text.startsWith("\\")) {
      at = now++;
      old++;
      inHunk = [inHunk[0] - 1, inHunk[1] - 1];
    }
    const hit = kind === "add" || kind === "same" ? crashed[file]?.[at] : null;
    box.append(el(
      "div",
      { class: `${kind}${hit ? " hit" : ""}` },
      el("span", { class: "at", "aria-hidden": "true" }, String(at)),
      el("code", {}, text || " "),
      hit ? el("span", { class: "here" }, `✕ ${short(hit.join(", "), 40)} crashed here`) : null,
    ));
  }
  return box;
}

function releaseCard(release) {
  const [added, removed] = counted(release.diff);
  const body = el("div", { class: "scroll diff-box" });
  const where = (one) => el(
    "li",
    {},
    `${one.host}: release ${one.number}`,
    one.current ? el("b", {}, " now") : null,
    `, ${one.command || "push"} by ${one.by}, ${when(one.at)}`,
    one.attempts.length ? [". Ran as ", seen(one.attempts)] : ". No attempt ran it.",
  );
  return el(
    "details",
    {
      class: "card release",
      ontoggle: (event) => {
        // Thousands of lines are made when somebody wants to see them.
        if (event.target.open && !body.firstChild) body.append(release.diff ? diffOf(release) : nothing("No difference to the release before."));
      },
    },
    el("summary", {},
      el("b", {}, release.patches.join(" + ") || "base"),
      el("span", { class: "counts" }, el("span", { class: "plus" }, `+${added}`), " ", el("span", { class: "minus" }, `−${removed}`)),
      el("span", { class: "note" }, `${plural(release.files.length, "file")} of ${release.version ?? "the package"}`),
      el("span", { class: "note right" }, release.where.some((one) => one.current) ? "now live" : "")),
    el("ul", { class: "where" }, release.where.map(where)),
    el("ul", { class: "files" }, release.files.map((one) => el("li", {}, el("code", {}, one.path), one.kind === "changed" ? null : ` ${one.kind}`))),
    release.cut ? el("p", { class: "note" }, "The diff is long and was cut; deployctl push --dry-run shows a patch's own in full.") : null,
    body,
  );
}

function releaseSection() {
  if (!data.releases.length) {
    return section("patches", "Patches", null, nothing("Every attempt ran the package as it was installed. Patch it with", "deployctl push --patch REF"));
  }
  return section("patches", "Patches", "Each release against the one it was pushed onto, newest first.", ...data.releases.map(releaseCard));
}
