// Charts that are drawn again in the other theme, for paper, and when what they show is chosen anew.

const drawn = [];

/** A canvas in a box of fixed height. `configure(width)` gives Chart.js's configuration in the colours of now. */
function figure(label, height, configure) {
  const canvas = el("canvas", { role: "img", "aria-label": label });
  const box = el("div", { class: "plot" }, canvas);
  box.style.height = `${height}px`;
  const entry = { chart: null, canvas, configure };
  entry.draw = () => {
    if (!canvas.isConnected) return;
    entry.chart?.destroy();
    entry.chart = new Chart(canvas, configure(box.clientWidth));
  };
  drawn.push(entry);
  box.redraw = entry.draw;
  return box;
}

function drawAll() {
  known.clear();
  Chart.defaults.color = colour("muted");
  Chart.defaults.borderColor = colour("line");
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  Chart.defaults.font.size = 12;
  Chart.defaults.animation = false;
  Chart.defaults.maintainAspectRatio = false;
  Chart.defaults.plugins.legend.display = false;
  Object.assign(Chart.defaults.plugins.tooltip, {
    backgroundColor: colour("tip"),
    titleColor: colour("tip-ink"),
    bodyColor: colour("tip-ink"),
    footerColor: colour("tip-ink"),
    titleFont: { weight: 600 },
    footerFont: { weight: 400 },
    padding: 10,
    cornerRadius: 6,
    boxPadding: 5,
    usePointStyle: true,
  });
  for (const entry of drawn) entry.draw();
}

/** Text beside what is drawn: Chart.js draws no labels of its own on data. */
function write(chart, text, x, y, fill, weight = 400) {
  const ink = chart.ctx;
  ink.save();
  ink.font = `${weight} 12px ${Chart.defaults.font.family}`;
  ink.fillStyle = fill;
  ink.textBaseline = "middle";
  ink.fillText(text, x, y);
  ink.restore();
}

/** A text no longer than so many characters. */
function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

const MINUTE = 60000, HOUR = 60 * MINUTE, DAY = 24 * HOUR;
const STEPS = [MINUTE, 5 * MINUTE, 15 * MINUTE, 30 * MINUTE, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR,
  DAY, 2 * DAY, 7 * DAY, 14 * DAY, 30 * DAY, 90 * DAY, 365 * DAY];

/** Round moments of local time between two, at most so many. */
function moments(from, to, most) {
  const step = STEPS.find((one) => (to - from) / one <= most) ?? STEPS[STEPS.length - 1];
  const midnight = new Date(from);
  midnight.setHours(0, 0, 0, 0);
  const found = [];
  for (let at = midnight.getTime(); at <= to; at += step) if (at >= from) found.push({ value: at });
  return { step, found };
}

/** A legend of words and swatches. */
function legend(entries) {
  return el(
    "ul",
    { class: "legend" },
    entries.map(([name, text, mark]) => el("li", {}, el("span", { class: `key ${name}`, "aria-hidden": "true" }, mark ?? ""), text)),
  );
}
