// Throughput and latency against concurrency: the attempts that are chosen, over all levels of one load.

const METRICS = [
  ["tok", "Output tokens/s", number, true, (level) => level.tok],
  ["req", "Requests/s", number, true, (level) => level.req],
  ["ttft50", "TTFT p50", milliseconds, false, (level) => level.ttft_ms[0]],
  ["ttft99", "TTFT p99", milliseconds, false, (level) => level.ttft_ms[1]],
  ["tpot50", "TPOT p50", milliseconds, false, (level) => level.tpot_ms[0]],
  ["tpot99", "TPOT p99", milliseconds, false, (level) => level.tpot_ms[1]],
  ["itl50", "ITL p50", milliseconds, false, (level) => level.itl_ms[0]],
  ["itl99", "ITL p99", milliseconds, false, (level) => level.itl_ms[1]],
  ["e2e50", "E2E p50", milliseconds, false, (level) => level.e2e_ms[0]],
  ["e2e99", "E2E p99", milliseconds, false, (level) => level.e2e_ms[1]],
  ["accept", "Accept length", number, true, (level) => level.accept],
];

const MOST_CHIPS = 10;

const curves = { load: data.loads[0], chosen: new Set(), metric: METRICS[0] };

function choose(load) {
  curves.load = load;
  curves.chosen = new Set(load.series.filter((line) => line.selected).map((line) => line.id));
}

const shownLines = () => curves.load.series.filter((line) => curves.chosen.has(line.id));

/** Values of a line at every level of the load; null where it was not measured, or not everything came back. */
function along(line, read) {
  return curves.load.levels.map((concurrency) => {
    const level = line.levels[concurrency];
    return level && level.good ? read(level) ?? null : null;
  });
}

function line(series, values, dashed) {
  const { name, shape, dash } = look(attempts.get(series.id));
  const ink = colour(name);
  return {
    label: series.name,
    series,
    second: dashed,
    data: values,
    borderColor: dashed ? colour(name, 0.55) : ink,
    backgroundColor: ink,
    borderWidth: dashed ? 1.25 : 2.25,
    borderDash: dashed ? [3, 3] : dash,
    pointStyle: shape,
    pointRadius: dashed ? 0 : 3.5,
    pointHoverRadius: dashed ? 0 : 6,
    pointBorderWidth: 2,
    pointHitRadius: 12,
    spanGaps: true,
    tension: 0,
  };
}

function levelAxis() {
  const levels = curves.load.levels;
  return {
    type: "logarithmic",
    min: Math.min(...levels) / 1.12,
    max: Math.max(...levels) * 1.12,
    afterBuildTicks: (axis) => { axis.ticks = levels.map((value) => ({ value })); },
    ticks: { callback: (value) => String(value), autoSkip: true, autoSkipPadding: 6, maxRotation: 0 },
    grid: { display: false },
    border: { color: colour("line-strong") },
    title: { display: true, text: "concurrent requests", color: colour("muted") },
  };
}

function chart(datasets, y, tooltip, plugins = [], right = 0) {
  const levels = curves.load.levels;
  return {
    type: "line",
    data: { labels: levels, datasets },
    options: {
      interaction: { mode: "index", intersect: false },
      layout: { padding: { right, top: 8 } },
      scales: { x: levelAxis(), y },
      plugins: {
        tooltip: {
          itemSort: (a, b) => b.parsed.y - a.parsed.y,
          filter: (item) => !item.dataset.second,
          callbacks: {
            title: (items) => (items.length ? `${items[0].label} concurrent` : ""),
            labelPointStyle: (item) => ({ pointStyle: item.dataset.pointStyle, rotation: 0 }),
            labelColor: (item) => ({ borderColor: item.dataset.backgroundColor, backgroundColor: item.dataset.backgroundColor }),
            ...tooltip,
          },
        },
      },
    },
    plugins: [crosshair, ...plugins],
  };
}

const crosshair = {
  id: "crosshair",
  beforeDatasetsDraw(chart) {
    const active = chart.tooltip?.getActiveElements?.() ?? [];
    if (!active.length) return;
    const { ctx, chartArea } = chart;
    ctx.save();
    ctx.strokeStyle = colour("line-strong");
    ctx.beginPath();
    ctx.moveTo(active[0].element.x, chartArea.top);
    ctx.lineTo(active[0].element.x, chartArea.bottom);
    ctx.stroke();
    ctx.restore();
  },
};

/** Names at the ends of the lines, moved apart where they would meet. */
const endLabels = {
  id: "endLabels",
  afterDatasetsDraw(chart) {
    const ends = chart.data.datasets.map((dataset, place) => {
      const points = chart.getDatasetMeta(place).data.filter((_, at) => dataset.data[at] !== null);
      const end = points[points.length - 1];
      return end && { text: short(dataset.label, 22), x: chart.chartArea.right + 8, y: end.y, fill: dataset.backgroundColor };
    }).filter(Boolean).sort((a, b) => a.y - b.y);
    for (let i = 1; i < ends.length; i++) ends[i].y = Math.max(ends[i].y, ends[i - 1].y + 15);
    const over = ends.length ? ends[ends.length - 1].y - chart.chartArea.bottom : 0;
    if (over > 0) {
      ends[ends.length - 1].y -= over;
      for (let i = ends.length - 2; i >= 0; i--) ends[i].y = Math.min(ends[i].y, ends[i + 1].y - 15);
    }
    for (const end of ends) write(chart, end.text, end.x, end.y, end.fill, 600);
  },
};

function throughput(width) {
  const lines = shownLines();
  const longest = Math.max(0, ...lines.map((one) => Math.min(22, one.name.length)));
  const labels = width > 640;
  return chart(
    lines.map((one) => line(one, along(one, (level) => level.tok))),
    {
      beginAtZero: true,
      border: { display: false },
      ticks: { callback: (value) => number(value), maxTicksLimit: 7 },
      title: { display: true, text: "output tokens per second", color: colour("muted") },
    },
    {
      label: (item) => {
        const best = Math.max(...item.chart.data.datasets.map((one) => one.data[item.dataIndex] ?? 0));
        const behind = item.parsed.y < best ? `  (${Math.round((item.parsed.y / best - 1) * 100)} %)` : "";
        return ` ${short(item.dataset.label, 28)}  ${number(item.parsed.y)} tok/s${behind}`;
      },
      footer: (items) => {
        const accepted = items.map((item) => [item, item.dataset.series.levels[item.label]?.accept]).filter(([, length]) => length);
        return accepted.map(([item, length]) => `accept length of ${short(item.dataset.label, 22)}: ${number(length)}`);
      },
    },
    labels ? [endLabels] : [],
    labels ? 16 + longest * 7.4 : 0,
  );
}

function latency(key) {
  return () => chart(
    shownLines().flatMap((one) => [
      line(one, along(one, (level) => level[key][0]), false),
      line(one, along(one, (level) => level[key][1]), true),
    ]),
    {
      type: "logarithmic",
      border: { display: false },
      afterBuildTicks: (axis) => {
        // Lines at 1, 2 and 5 of each decade, each with its number.
        const round = axis.ticks.filter(({ value }) => [1, 2, 5].includes(Number((value / 10 ** Math.floor(Math.log10(value) + 1e-9)).toFixed(3))));
        if (round.length > 2) axis.ticks = round;
      },
      ticks: { callback: (value) => milliseconds(value) },
    },
    {
      label: (item) => {
        const [half, most] = item.dataset.series.levels[item.label][key];
        return ` ${short(item.dataset.label, 22)}  ${milliseconds(half)} · p99 ${milliseconds(most)}`;
      },
    },
  );
}

// -- the table of one metric ------------------------------------------------------------------------------------------

function numbersTable() {
  const [, , show, higher, read] = curves.metric;
  const lines = shownLines();
  const columns = lines.map((one) => along(one, read));
  const best = curves.load.levels.map((_, at) => {
    const found = columns.map((values) => values[at]).filter((value) => value !== null);
    return found.length > 1 ? (higher ? Math.max(...found) : Math.min(...found)) : null;
  });
  const cell = (one, values, at) => {
    const level = one.levels[curves.load.levels[at]];
    if (level && !level.good) return el("td", { class: "failed", title: "not every request came back" }, `${level.completed}/${level.sent}`);
    const value = values[at];
    return el("td", { class: value !== null && value === best[at] ? "best" : null }, show(value));
  };
  return el(
    "table",
    { class: "numbers" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "C"), curves.load.levels.map((level) => el("th", { scope: "col" }, String(level))))),
    el("tbody", {}, lines.map((one, row) => el(
      "tr",
      {},
      el("th", { scope: "row" }, swatch(attempts.get(one.id)), one.name),
      columns[row].map((_, at) => cell(one, columns[row], at)),
    ))),
  );
}

/** Settings of the servers that are not the same for all that are shown. */
function differences() {
  const lines = shownLines();
  const told = (value) => (Array.isArray(value) ? value.join(", ") : value === undefined ? "–" : String(value));
  const keys = [...new Set(lines.flatMap((one) => Object.keys(one.settings)))];
  const differing = keys.filter((key) => new Set(lines.map((one) => told(one.settings[key]))).size > 1);
  if (lines.length < 2 || !differing.length) return null;
  return el(
    "details",
    { class: "differs" },
    el("summary", {}, `Settings in which these servers differ (${differing.length})`),
    el("div", { class: "scroll" }, el(
      "table",
      { class: "settings" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "setting"), lines.map((one) => el("th", { scope: "col" }, swatch(attempts.get(one.id)), one.name)))),
      el("tbody", {}, differing.map((key) => el("tr", {}, el("th", { scope: "row" }, key), lines.map((one) => el("td", {}, told(one.settings[key])))))),
    )),
  );
}

// -- the section ------------------------------------------------------------------------------------------------------

function loadName(load) {
  const parts = [load.count ? `${load.name}, ${load.count} prompts` : load.name];
  if (load.maxTokens) parts.push(`${number(load.maxTokens)} tokens each`);
  // Curves of one chart have these in common: without them two entries of the list could read the same.
  if (load.perLevel) parts.push(`${number(load.perLevel)} requests a level`);
  if (load.seed !== null && load.seed !== 1) parts.push(`seed ${load.seed}`);
  parts.push([load.generator.name, load.generator.version].filter(Boolean).join(" "));
  parts.push(load.gpus, load.model && load.model.split("/").pop());
  return parts.filter(Boolean).join(" · ");
}

function curvesSection() {
  if (!data.loads.length) {
    return section("curve", "Throughput and latency", null, nothing("No attempt has been measured yet. Measure a running server with", data.benchCommand));
  }
  choose(data.loads[0]);
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Attempts shown" });
  const table = el("div", { class: "scroll" });
  const differs = el("div", {});
  const care = el("div", {});
  const plots = [
    figure("Output tokens per second against concurrency", 380, throughput),
    ...["ttft_ms", "tpot_ms", "e2e_ms"].map((key) => figure(`${key} against concurrency`, 250, latency(key))),
  ];
  const numbers = () => {
    table.replaceChildren(numbersTable());
    const found = differences();
    differs.replaceChildren(...(found ? [found] : []));
  };
  const redraw = () => {
    for (const plot of plots) plot.redraw();
    numbers();
  };
  let all = false;
  const fill = () => {
    // Of many the chosen and the newest have a chip at once.
    const newest = curves.load.series.slice(-MOST_CHIPS);
    const offered = curves.load.series.filter((one) => all || curves.chosen.has(one.id) || newest.includes(one));
    const more = curves.load.series.length - offered.length;
    chips.replaceChildren(...offered.map((one) => el(
      "button",
      {
        type: "button",
        class: "chip",
        "aria-pressed": String(curves.chosen.has(one.id)),
        title: `${attempts.get(one.id).host}, attempt ${attempts.get(one.id).attempt}, ${attempts.get(one.id).patches.join(" + ") || "base"}`,
        onclick: (event) => {
          if (!curves.chosen.delete(one.id)) curves.chosen.add(one.id);
          event.currentTarget.setAttribute("aria-pressed", String(curves.chosen.has(one.id)));
          redraw();
        },
      },
      swatch(attempts.get(one.id)),
      one.name,
      " ",
      el("small", {}, stack(attempts.get(one.id).patches)),
    )), ...(more ? [el("button", { type: "button", class: "quiet", onclick: () => { all = true; fill(); } }, `${more} more`)] : []));
    care.replaceChildren(...(curves.load.notes.length ? [notes(curves.load.notes)] : []));
    numbers();
  };
  fill();
  const loads = data.loads.length > 1 ? el(
    "label",
    { class: "pick" },
    "Load ",
    el("select", { onchange: (event) => { choose(data.loads[event.target.value]); all = false; fill(); redraw(); } },
      data.loads.map((load, place) => el("option", { value: place }, loadName(load)))),
  ) : null;
  const metric = el(
    "label",
    { class: "pick" },
    "Numbers ",
    el("select", { onchange: (event) => { curves.metric = METRICS[event.target.value]; numbers(); } },
      METRICS.map(([, name], place) => el("option", { value: place }, name))),
  );
  const small = (plot, title, long) => el("figure", {}, el("figcaption", {}, el("b", {}, title), ` ${long}`), plot);
  return section(
    "curve",
    "Throughput and latency",
    data.loads.length > 1 ? null : loadName(data.loads[0]),
    loads,
    chips,
    el("figure", { class: "main" }, plots[0]),
    el("div", { class: "three" },
      small(plots[1], "TTFT", "time to first token"),
      small(plots[2], "TPOT", "time per output token"),
      small(plots[3], "E2E", "whole request")),
    legend([["stroke", "p50"], ["stroke dashed", "p99"]]),
    care,
    el("div", { class: "over" }, metric),
    table,
    differs,
  );
}

/** What to know before one believes a curve. */
function notes(texts) {
  const list = (some) => el("ul", {}, some.map((text) => el("li", {}, text)));
  return el(
    "aside",
    { class: "care" },
    el("b", {}, "Read with care"),
    list(texts.slice(0, 4)),
    texts.length > 4 ? el("details", {}, el("summary", {}, `${texts.length - 4} more`), list(texts.slice(4))) : null,
  );
}
