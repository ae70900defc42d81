// All attempts in one table: sorted by any column, filtered by any word, with the details of each.

const COLUMNS = [
  { title: "Attempt", read: (one) => one.at, show: (one) => [swatch(one), el("b", {}, one.name)] },
  { title: "No.", read: (one) => one.attempt, show: (one) => String(one.attempt), numeric: true },
  { title: "Host", read: (one) => one.host, show: (one) => one.host, only: several },
  { title: "Patches", read: (one) => stack(one.patches), show: (one) => stack(one.patches) },
  { title: "Verdict", read: (one) => one.words, show: (one) => verdict(one) },
  { title: "Launched", read: (one) => one.at, show: (one) => when(one.at), numeric: true },
  { title: "Ready after", read: (one) => one.ready, show: (one) => duration(one.ready), numeric: true },
  { title: "Best tok/s", read: (one) => one.best, show: (one) => number(one.best), numeric: true },
  { title: "Cause", read: (one) => one.cause ?? "", show: (one) => cause(one), wide: true },
].filter((column) => column.only !== false);

function cause(one) {
  if (one.cause) return el("a", { href: `#crash-${one.card}`, class: "cause" }, one.cause);
  return one.smoke?.problem ?? "";
}

function cellClass(column, one) {
  const unknown = column.read(one) === null || column.read(one) === "";
  return [column.numeric && "numeric", column.wide && "cause-cell", column.title === "No." && "small-no", unknown && "unknown"].filter(Boolean).join(" ") || null;
}

function details(one) {
  const smoke = one.smoke && [
    one.smoke.problem ?? JSON.stringify(one.smoke.text),
    one.smoke.sent ? ` burst: ${one.smoke.answered} of ${one.smoke.sent} answered` : "",
  ].join("");
  const rows = [
    ["Command", one.command],
    ["Environment", Object.entries(one.env).map(([name, value]) => `${name}=${value}`).join("\n")],
    ["Smoke", smoke],
    ["Release", `${one.release ?? 0} (${one.patches.join(" + ") || "base"})${one.version ? `, version ${one.version}` : ""}`],
    ["Profile", one.profile],
    ["By", one.by],
    ["Ended", one.ended === null ? null : when(one.ended)],
    ["Log", one.log],
  ];
  return el("dl", {}, rows.filter(([, value]) => value).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
}

function compared(a, b) {
  if (a === b) return 0;
  // What is not known comes last in either order.
  if (a === null || a === undefined || a === "") return Infinity;
  if (b === null || b === undefined || b === "") return -Infinity;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
}

function attemptTable() {
  const rows = data.attempts.map((one) => {
    const below = el("tr", { class: "below", hidden: true }, el("td", { colspan: COLUMNS.length + 1 }));
    const button = el("button", {
      type: "button",
      class: "unfold",
      "aria-expanded": "false",
      "aria-label": `Details of ${one.name}`,
      onclick: () => {
        if (!below.firstChild.firstChild) below.firstChild.append(details(one));
        below.hidden = !below.hidden;
        button.setAttribute("aria-expanded", String(!below.hidden));
      },
    }, "›");
    const row = el(
      "tr",
      { id: `row-${one.id}` },
      el("td", { class: "opener" }, button),
      COLUMNS.map((column) => el("td", { class: cellClass(column, one), "data-label": column.title }, el("div", { class: "cell" }, column.show(one)))),
    );
    const words = [one.name, one.attempt, one.host, one.words, one.patches.join(" "), one.cause ?? "", one.by, one.profile, one.command].join(" ").toLowerCase();
    return { one, row, below, words };
  });
  const body = el("tbody", {}, rows.flatMap(({ row, below }) => [row, below]));
  const state = { column: null, down: false };
  const heads = COLUMNS.map((column) => {
    const head = el("th", { scope: "col", "aria-sort": "none", class: column.numeric ? "numeric" : null }, el("button", {
      type: "button",
      onclick: () => {
        state.down = state.column === column ? !state.down : false;
        state.column = column;
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
        rows.sort((a, b) => {
          const order = compared(column.read(a.one), column.read(b.one));
          return Number.isFinite(order) && state.down ? -order : order;
        });
        body.append(...rows.flatMap(({ row, below }) => [row, below]));
      },
    }, column.title));
    return head;
  });
  const count = el("span", { class: "note", role: "status" });
  const filter = el("input", {
    type: "search",
    placeholder: "Filter: tag, host, patch, verdict, cause",
    "aria-label": "Filter attempts",
    oninput: () => {
      const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const { row, below, words } of rows) {
        const fits = wanted.every((word) => words.includes(word));
        row.hidden = !fits;
        if (!fits) below.hidden = true;
        shown += fits;
      }
      count.textContent = wanted.length ? `${shown} of ${plural(rows.length, "attempt")}` : "";
    },
  });
  return [
    el("div", { class: "over" }, filter, count),
    el("div", { class: "scroll cards" }, el("table", { class: "attempts" }, el("thead", {}, el("tr", {}, el("th", {}), heads)), body)),
  ];
}

function tableSection() {
  if (!data.attempts.length) return null;
  return section("table", "Table of attempts", null, ...attemptTable());
}
