// Attempts over time, and how long each took to load.

const MOST_ROWS = 20;
const POINTS = { good: "circle", bad: "crossRot", doubtful: "triangle", open: "circle" };

function lanes() {
  const found = new Map();
  for (const one of data.attempts) {
    const key = JSON.stringify([one.host, one.patches]);
    if (!found.has(key)) found.set(key, { host: one.host, text: (several ? `${one.host}  ` : "") + stack(one.patches), members: [] });
    found.get(key).members.push(one);
  }
  const order = data.hosts.map((host) => host.name);
  const newest = [...found.values()].sort((a, b) => a.members[a.members.length - 1].at - b.members[b.members.length - 1].at).slice(-MOST_ROWS);
  return {
    rows: [...found.values()].filter((lane) => newest.includes(lane)).sort((a, b) => order.indexOf(a.host) - order.indexOf(b.host)),
    left: found.size - newest.length,
  };
}

function timeline(rows) {
  const times = rows.flatMap((row) => row.members).flatMap((one) => [one.at, one.ended ?? one.at]).filter((at) => at !== null);
  if (rows.some((row) => row.members.some((one) => one.ended === null && one.kind === "good"))) times.push(data.at);
  const from = Math.min(...times), to = Math.max(...times);
  const margin = Math.max((to - from) * 0.03, MINUTE / 3);
  return (width) => {
    const lives = [];
    const points = [];
    for (const kind of ["good", "doubtful", "bad", "open"]) {
      const ink = colour(kind);
      const life = [];
      const marks = [];
      rows.forEach((row, lane) => row.members.filter((one) => one.kind === kind && one.at !== null).forEach((one) => {
        const end = one.ended ?? (one.state === "ready" || one.state === "smoke_failed" ? data.at : one.at);
        life.push({ x: one.at, y: lane }, { x: end, y: lane }, { x: end, y: NaN });
        marks.push({ x: one.at, y: lane, one });
      }));
      lives.push({ data: life, borderColor: colour(kind, 0.3), borderWidth: 7, borderCapStyle: "butt", pointRadius: 0, pointHitRadius: 0, pointHoverRadius: 0, tension: 0, order: 2 });
      points.push({ data: marks, showLine: false, pointStyle: POINTS[kind], pointRadius: 5, pointHoverRadius: 7, borderColor: ink, pointBorderWidth: kind === "good" ? 0 : 2, backgroundColor: kind === "open" ? colour("paper") : ink, order: 1 });
    }
    return {
      type: "line",
      data: { datasets: [...lives, ...points] },
      options: {
        interaction: { mode: "nearest", intersect: true },
        layout: { padding: { top: 4, right: 8 } },
        scales: {
          x: {
            type: "linear",
            min: from - margin,
            max: to + margin,
            afterBuildTicks: (axis) => {
              const { step, found } = moments(axis.min, axis.max, Math.max(4, Math.floor(width / 80)));
              axis.step = step;
              axis.ticks = found;
            },
            ticks: { callback(value) { return this.step >= DAY || clock(value) === "00:00" ? day(value) : clock(value); }, maxRotation: 0 },
            border: { color: colour("line-strong") },
          },
          y: {
            type: "linear",
            reverse: true,
            min: -0.6,
            max: rows.length - 0.4,
            afterBuildTicks: (axis) => { axis.ticks = rows.map((_, value) => ({ value })); },
            ticks: { callback: (value) => short(rows[value].text, width > 600 ? 34 : 16), autoSkip: false, color: colour("ink") },
            border: { display: false },
          },
        },
        plugins: {
          tooltip: {
            filter: (item) => Boolean(item.raw.one),
            callbacks: {
              title: (items) => items.map((item) => `${item.raw.one.name}: ${item.raw.one.words}`),
              label: (item) => ` ${when(item.raw.one.at)}, attempt ${item.raw.one.attempt} of ${item.raw.one.host}`,
              footer: (items) => items.flatMap(({ raw: { one } }) => [
                one.ready === null ? null : `ready after ${duration(one.ready)}`,
                one.cause ? short(one.cause, 70) : null,
              ].filter(Boolean)),
            },
          },
        },
      },
    };
  };
}

function timeSection() {
  if (!data.attempts.length) {
    return section("attempts", "Attempts over time", null, nothing("Nothing has been launched yet. Start a server with", "deployctl launch --log-tag TAG"));
  }
  const { rows, left } = lanes();
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  return section(
    "attempts",
    "Attempts over time",
    `Each mark is a launch, its bar the time that the server ran. Times in ${zone}.${left ? ` The ${plural(left, "release")} that ran longest ago stand in the table alone.` : ""}`,
    legend([["good", "ready or served", "●"], ["doubtful", "smoke failed, not ready in time", "▲"], ["bad", "crashed", "✕"], ["open", "loading, stopped early, unknown", "○"]]),
    figure("Attempts over time by release", 58 + rows.length * 30, timeline(rows)),
  );
}

// -- load phases ------------------------------------------------------------------------------------------------------

const PHASES = ["init", "weights", "kv-cache", "graphs", "warm-up"];

const totals = {
  id: "totals",
  afterDatasetsDraw(chart) {
    chart.data.rows.forEach((one, row) => {
      const total = one.phases.reduce((sum, phase) => sum + phase.seconds, 0);
      const x = chart.scales.x.getPixelForValue(total) + 7;
      const bar = chart.getDatasetMeta(0).data[row];
      if (!bar) return;
      const lost = one.words === "crashed loading";
      write(chart, lost ? `✕ after ${duration(total)}` : duration(one.ready ?? total), x, bar.y, colour(lost ? "bad" : "muted"));
    });
  },
};

function gantt(rows) {
  const names = [...new Set([...PHASES, ...rows.flatMap((one) => one.phases.map((phase) => phase.name))])];
  const longest = Math.max(...rows.map((one) => one.phases.reduce((sum, phase) => sum + phase.seconds, 0)));
  const step = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600].find((one) => longest / one <= 8) ?? 7200;
  return (width) => ({
    type: "bar",
    data: {
      labels: rows.map((one) => one.name),
      rows,
      datasets: names.map((name, place) => ({
        label: name,
        data: rows.map((one) => one.phases.filter((phase) => phase.name === name).reduce((sum, phase) => sum + phase.seconds, 0) || null),
        backgroundColor: colour(`phase-${place % 5}`),
        barThickness: 13,
        borderWidth: { right: 1 },
        borderColor: colour("paper"),
        borderSkipped: false,
      })),
    },
    options: {
      indexAxis: "y",
      interaction: { mode: "y", intersect: false },
      layout: { padding: { right: 92 } },
      scales: {
        x: {
          stacked: true,
          max: longest,
          ticks: { includeBounds: false, stepSize: width > 600 ? step : step * 2, callback: (value) => (value ? duration(value).replace(".0 s", " s") : "0"), maxRotation: 0 },
          border: { display: false },
        },
        y: {
          stacked: true,
          grid: { display: false },
          ticks: {
            autoSkip: false,
            color: (tick) => colour(rows[tick.index]?.kind === "bad" ? "bad" : "ink"),
            callback: (_, place) => short(rows[place].name, width > 600 ? 30 : 14),
          },
          border: { color: colour("line-strong") },
        },
      },
      plugins: {
        tooltip: {
          filter: (item) => item.parsed.x > 0,
          callbacks: {
            title: (items) => (items.length ? `${rows[items[0].dataIndex].name}: ${rows[items[0].dataIndex].words}` : ""),
            label: (item) => ` ${item.dataset.label}  ${duration(item.parsed.x)}`,
            footer: (items) => {
              const one = items.length ? rows[items[0].dataIndex] : null;
              return one?.ready ? `ready after ${duration(one.ready)}` : "";
            },
          },
        },
      },
    },
    plugins: [totals],
  });
}

function loadSection() {
  const all = data.attempts.filter((one) => one.phases.length);
  if (!all.length) return section("load", "Load phases", null, nothing("No load has told its phases yet."));
  const box = el("div", {});
  const fill = (rows) => {
    const plot = figure("Seconds of each load phase", 44 + rows.length * 22, gantt(rows));
    box.replaceChildren(plot);
    return plot;
  };
  const newest = all.slice(-MOST_ROWS);
  const more = all.length > newest.length ? el(
    "button",
    { type: "button", class: "quiet", onclick: (event) => { fill(all).redraw(); event.currentTarget.remove(); } },
    `Show all ${all.length} loads`,
  ) : null;
  const silent = data.attempts.length - all.length;
  const note = `From launch to ready${more ? `, the newest ${newest.length}` : ""}. ${silent ? `${plural(silent, "attempt")} told no phases.` : ""}`;
  fill(newest);
  return section("load", "Load phases", note, legend(PHASES.map((name, place) => [`phase-${place}`, name])), box, more);
}
