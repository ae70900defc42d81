// What all sections share: the data, elements made from text alone, numbers as people read them, and the theme.

const data = JSON.parse(document.getElementById("data").textContent);
const attempts = new Map(data.attempts.map((one) => [one.id, one]));
const several = data.hosts.length > 1;

/** An element. Texts become text nodes, never markup: what hosts told is shown, not obeyed. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

/** A section of the page with its heading; it takes its place in the navigation. */
function section(id, heading, note, ...children) {
  document.getElementById("nav").append(el("a", { href: `#${id}` }, heading.split(" ")[0].replace(",", "")));
  return el(
    "section",
    { id, "aria-label": heading },
    el("h2", {}, heading),
    note ? el("p", { class: "note" }, note) : null,
    ...children,
  );
}

/** What to type where there is nothing to show yet. */
function nothing(text, command) {
  return el("p", { class: "nothing" }, text, command ? " " : "", command ? el("code", {}, command) : "");
}

// -- numbers ----------------------------------------------------------------------------------------------------------

const THIN = "\u202f";

function grouped(value, digits) {
  const [whole, rest] = value.toFixed(digits).split(".");
  return whole.replace(/\B(?=(\d{3})+$)/g, THIN) + (rest ? `.${rest}` : "");
}

/** Three digits that mean something: 7.42, 88.1, 2 310. */
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return grouped(value, size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2);
}

function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  return value >= 1000 ? `${number(value / 1000)} s` : `${number(value)} ms`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const parts = whole < 3600 ? [Math.floor(whole / 60), "min", whole % 60, "s"]
    : whole < 86400 ? [Math.floor(whole / 3600), "h", Math.floor((whole % 3600) / 60), "min"]
    : [Math.floor(whole / 86400), "d", Math.floor((whole % 86400) / 3600), "h"];
  return parts[2] ? `${parts[0]} ${parts[1]} ${parts[2]} ${parts[3]}` : `${parts[0]} ${parts[1]}`;
}

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const two = (value) => String(value).padStart(2, "0");

function day(at) {
  const date = new Date(at);
  return `${date.getDate()} ${MONTHS[date.getMonth()]}`;
}

function clock(at) {
  const date = new Date(at);
  return `${two(date.getHours())}:${two(date.getMinutes())}`;
}

function when(at) {
  return at === null ? "–" : `${day(at)} ${clock(at)}`;
}

function plural(count, noun, many = `${noun}s`) {
  return `${number(count)} ${count === 1 ? noun : many}`;
}

// A series' name stands before every version: where there is but one, it says nothing.
const oneSeries = new Set(data.attempts.flatMap((one) => one.patches.map((patch) => patch.split("/")[0]))).size === 1;

function stack(patches) {
  if (!patches.length) return "base";
  return patches.map((patch) => (oneSeries ? patch.slice(patch.indexOf("/") + 1) : patch)).join(" + ");
}

// -- theme ------------------------------------------------------------------------------------------------------------

const probe = document.body.appendChild(el("span", { class: "probe", "aria-hidden": "true" }));

const known = new Map();

/** A colour of the style sheet as a canvas takes it: light-dark() is resolved by an element that wears it. */
function colour(name, alpha = 1) {
  if (!known.has(name)) {
    probe.style.color = `var(--${name})`;
    known.set(name, getComputedStyle(probe).color);
  }
  const found = known.get(name);
  return alpha === 1 ? found : found.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);
}

const COLOURS = 8;
const SHAPES = ["circle", "rect", "triangle", "rectRot", "star", "crossRot"];

/** Colour, point and dash of an attempt, the same in every chart, card and table. */
function look(one) {
  const number = one.colour ?? 0;
  return {
    name: one.colour === null ? "faint" : `series-${number % COLOURS}`,
    shape: SHAPES[number % SHAPES.length],
    dash: number < COLOURS ? [] : number < 2 * COLOURS ? [6, 3] : [2, 2],
  };
}

function swatch(one) {
  return el("span", { class: `swatch ${look(one).name}`, "aria-hidden": "true" });
}

const MARKS = { good: "●", bad: "✕", doubtful: "▲", open: "○" };

function verdict(one) {
  return el("span", { class: `verdict ${one.kind}` }, el("span", { "aria-hidden": "true" }, MARKS[one.kind]), " ", one.words);
}
