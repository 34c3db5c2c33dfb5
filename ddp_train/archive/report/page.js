// The program of `ddp-train report`'s page. Everything is in the page: nothing is loaded, nothing is sent.
"use strict";
(async () => {
  // ---------------------------------------------------------------- what the page holds
  const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const packed = new Blob([bytesOf(document.getElementById("content").textContent.trim())]).stream();
  const D = await new Response(packed.pipeThrough(new DecompressionStream("deflate"))).json();
  const unpacked = new Map();
  const numbers = (text) => { // of float32: the first bytes of all of them, then the second ones
    if (unpacked.has(text)) return unpacked.get(text);
    const shuffled = bytesOf(text), count = shuffled.length / 4, bytes = new Uint8Array(shuffled.length);
    for (let i = 0; i < count; i++) for (let b = 0; b < 4; b++) bytes[4 * i + b] = shuffled[b * count + i];
    const made = new Float32Array(bytes.buffer);
    unpacked.set(text, made);
    return made;
  };
  const leaves = (tree, prefix = "") => Object.entries(tree).flatMap(([key, value]) => {
    const isTree = value && typeof value === "object" && (!Array.isArray(value) || value.some((item) => item && typeof item === "object"));
    return isTree ? leaves(value, `${prefix}${key}.`) : [[prefix + key, value]];
  });
  const runs = D.runs, many = runs.length > 1, M = D.headline.metric, better = D.headline.goal === "max" ? 1 : -1;

  // ---------------------------------------------------------------- words and numbers
  const WHOLE = new Intl.NumberFormat("en-US");
  const fmt = (v, digits = 5) => {
    if (v === null || v === undefined || v === "") return "–";
    if (typeof v !== "number") return typeof v === "object" ? JSON.stringify(v) : String(v);
    if (Number.isNaN(v)) return "NaN";
    if (Number.isInteger(v) && Math.abs(v) < 1e9) return WHOLE.format(v);
    if (Math.abs(v) >= 1e6 || Math.abs(v) < 1e-3) return v.toExponential(Math.max(1, digits - 2)).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(v.toPrecision(digits)));
  };
  const duration = (s) => {
    if (s === null || s === undefined || Number.isNaN(s)) return "–";
    if (s < 60) return `${Number(s.toPrecision(3))} s`;
    return s < 7200 ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s` : `${Number((s / 3600).toPrecision(3))} h`;
  };
  const percent = (v) => (100 * v >= 99.95 || v === 0 ? `${Math.round(100 * v)} %` : `${(100 * v).toFixed(1)} %`);
  const finite = (v) => typeof v === "number" && Number.isFinite(v), numeric = (v) => (finite(v) ? v : null);
  const short = (key) => key.replace(/\._target_$/, "").replace(/^(train|eval)\//, (m) => m);
  const valueText = (v) => (typeof v === "string" && v.startsWith("ddp_train.") ? v.split(".").pop() : fmt(v, 6));
  const plural = (n, noun) => `${fmt(n)} ${noun}${n === 1 ? "" : "s"}`;
  const T95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101,
    2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042];
  const interval = (values) => { // mean, and half of its 95 % interval by Student's t
    const n = values.length, mean = values.reduce((a, b) => a + b, 0) / n;
    const spread = Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / (n - 1));
    return { n, mean, spread, half: n > 1 ? ((T95[n - 2] ?? 1.96) * spread) / Math.sqrt(n) : NaN };
  };

  // ---------------------------------------------------------------- elements
  const build = (element, props, kids) => {
    for (const [name, value] of Object.entries(props || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "value" || name === "checked") element[name] = value;
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...kids.flat(Infinity).filter((k) => k !== null && k !== undefined && k !== false));
    return element;
  };
  const h = (tag, props, ...kids) => build(document.createElement(tag), props, kids);
  const svg = (tag, props, ...kids) => build(document.createElementNS("http://www.w3.org/2000/svg", tag), props, kids);
  const swatch = (color) => h("i", { class: "swatch", style: `background:${color}`, "aria-hidden": "true" });
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const tip = h("div", { class: "tip", role: "status", hidden: true });
  const showTip = (x, y, ...kids) => {
    tip.replaceChildren(...kids.flat(Infinity).filter(Boolean));
    tip.hidden = false;
    const w = tip.offsetWidth, left = x + 16 + w > innerWidth - 8 ? Math.max(8, x - w - 16) : x + 16;
    tip.style.transform = `translate(${left}px,${Math.max(8, Math.min(y + 14, innerHeight - tip.offsetHeight - 8))}px)`;
  };
  const hideTip = () => (tip.hidden = true);
  const select = (label, options, value, change) => h("label", { class: "field" }, h("span", {}, label),
    h("select", { onchange: (e) => change(e.target.value), "aria-label": label },
      options.map(([v, text]) => h("option", { value: v, selected: String(v) === String(value) }, text))));

  // ---------------------------------------------------------------- state: all of it is in the fragment of the address
  const isSample = (r) => r.counts || !runs.some((x) => x.counts);
  const best = runs.reduce((b, r, i) => (finite(r.last[M]) && isSample(r) && (b < 0 || better * (r.last[M] - runs[b].last[M]) > 0) ? i : b), -1);
  const DEFAULTS = { x: "step", s: 0, ly: 0, lx: 0, z: "", off: "", b: "", run: Math.max(0, best), vs: 0, g: 0, q: "", sort: "", m: "",
    k: "", px: "", py: "", heat: "own", t: "", d: 0, f: "", dyn: 1 };
  const S = { ...DEFAULTS };
  const readState = () => {
    Object.assign(S, DEFAULTS);
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      if (Object.hasOwn(DEFAULTS, name)) S[name] = typeof DEFAULTS[name] === "number" ? Number(value) || 0 : value;
    }
    S.run = Math.min(Math.max(0, S.run | 0), runs.length - 1);
    S.vs = Math.min(Math.max(0, S.vs | 0), runs.length - 1);
    S.s = Math.min(Math.max(0, S.s), 0.99);
    const known = { x: axisWords, t: HUES, heat: { ...PARTS, compute: 0 } };
    for (const name of Object.keys(known)) if (!Object.hasOwn(known[name], S[name])) S[name] = DEFAULTS[name];
    S.b = S.b.split(";").filter((part) => { // a link may be cut
      const [name, low, high] = part.split("~");
      try { return decodeURIComponent(name) && finite(Number(low)) && finite(Number(high)); } catch { return false; }
    }).join(";");
  };
  const writeState = () => {
    const kept = Object.entries(S).filter(([name, value]) => String(value) !== String(DEFAULTS[name]));
    const text = "#" + new URLSearchParams(kept.map(([n, v]) => [n, String(v)])).toString();
    if (text === (location.hash || "#")) return;
    try { history.replaceState(null, "", text === "#" ? location.pathname + location.search : text); } catch { location.hash = text; }
  };
  const updates = [];
  let scheduled = false;
  const refresh = () => {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => { scheduled = false; for (const update of updates) update(); });
  };
  const set = (changes) => { Object.assign(S, changes); writeState(); refresh(); };
  const listOf = (text) => new Set(text.split(",").filter(Boolean));
  const toggled = (text, item) => {
    const items = listOf(text);
    if (!items.delete(String(item))) items.add(String(item));
    return [...items].join(",");
  };
  const zoom = () => { const [a, b] = S.z.split("~").map(Number); return b - a > 1e-6 * Math.abs(b) ? [a, b] : null; };
  const brush = () => new Map(S.b.split(";").filter(Boolean).map((part) => {
    const [name, low, high] = part.split("~");
    return [decodeURIComponent(name), [Number(low), Number(high)]];
  }));
  const setBrush = (changes) => {
    const all = brush();
    for (const [name, range] of Object.entries(changes)) range ? all.set(name, range) : all.delete(name);
    set({ b: [...all].map(([n, [lo, hi]]) => `${encodeURIComponent(n)}~${+lo.toPrecision(6)}~${+hi.toPrecision(6)}`).join(";") });
  };

  // ---------------------------------------------------------------- runs: dimensions, colours, which are shown
  const LEVELS = {}; // of keys whose values are no numbers: the values in order
  for (const key of D.keys) {
    const values = runs.map((r) => r.values[key]);
    if (values.some((v) => numeric(v) === null)) LEVELS[key] = [...new Set(values.map((v) => valueText(v)))];
  }
  for (const r of runs) if (D.keys.length && /^\d+$/.test(r.name)) { // the number of a sweep's job: with some of its values
    r.name += ` ${D.keys.slice(0, 4).map((k) => `${short(k).split(".").pop()}=${valueText(r.values[k])}`).join(",")}`;
  }
  const metricNames = [...new Set(runs.flatMap((r) => Object.keys(r.last)))].filter((n) => runs.some((r) => numeric(r.last[n]) !== null));
  const dimension = (r, name) => {
    if (D.keys.includes(name)) return LEVELS[name] ? LEVELS[name].indexOf(valueText(r.values[name])) : numeric(r.values[name]);
    return name === "seconds" ? numeric(r.seconds) : numeric(r.last[name]);
  };
  const dimensionText = (r, name) => (D.keys.includes(name) ? valueText(r.values[name]) : fmt(dimension(r, name)));
  const goalOf = (name) => {
    if (name === M) return better;
    return /loss|second|_ms$|perplexity|error|_gib$|wait|norm/.test(name) ? -1 : 1;
  };
  const rank = runs.map((r) => dimension(r, M));
  const groupOf = runs.map((r) => r.group); // those of one differ by their seed or fold alone
  const groups = [...new Set(groupOf)].map((group) => runs.map((r, i) => i).filter((i) => groupOf[i] === group));
  const samplesOf = (g) => g.filter((i) => runs[i].counts); // completed, and no other run counts for its settings and seed
  const hasSeeds = groups.some((g) => samplesOf(g).length > 1);
  const nameOfGroup = (g) => runs[g[0]].label || (groups.length > 1 ? runs[g[0]].name : "all");
  const HUES = { light: ["#1f6fb4", "#d1621b", "#1a9270", "#b8528f", "#58a9d8", "#9a7d0a", "#6f5bb5", "#6b7280"],
    dark: ["#5aa2e0", "#f0935a", "#45c2a0", "#dd86b8", "#8fd0f2", "#d8b53c", "#a796e6", "#a3a9b3"] };
  const RAMP = { light: ["#29335c", "#2c5f8a", "#3a8f95", "#7fae6a", "#d9a520"],
    dark: ["#5b74c8", "#4f9bd0", "#53bdb5", "#a4cf86", "#f3cf5b"] };
  const PARTS = { data: 5, forward: 0, backward: 4, communication: 1, optimizer: 2, evaluation: 6, checkpoint: 3, other: 7 };
  const theme = () => document.documentElement.dataset.theme;
  const hue = (i) => HUES[theme()][i % 8];
  const mix = (stops, share) => {
    const at = Math.min(0.9999, Math.max(0, share)) * (stops.length - 1), i = Math.floor(at), t = at - i;
    const rgb = (c) => [1, 3, 5].map((p) => parseInt(c.slice(p, p + 2), 16));
    const [a, b] = [rgb(stops[i]), rgb(stops[i + 1])];
    return `rgb(${a.map((v, n) => Math.round(v + (b[n] - v) * t)).join(",")})`;
  };
  const order = runs.map((_, i) => i).filter((i) => rank[i] !== null).sort((a, b) => better * (rank[a] - rank[b]));
  const colorOf = (i) => {
    if (S.g && hasSeeds && groups.length <= 8) return hue(groupOf[i]);
    if (runs.length <= 8) return hue(i);
    return order.includes(i) ? mix(RAMP[theme()], order.indexOf(i) / Math.max(1, order.length - 1)) : css("--faint");
  };
  const passes = (r, text) => text.split(/\s+/).filter(Boolean).every((word) => {
    const found = word.match(/^(.+?)(<=|>=|=|<|>)(.+)$/);
    if (!found) return `${r.name} ${r.status}`.toLowerCase().includes(word.toLowerCase());
    const [, name, sign, wanted] = found;
    const full = [...D.keys, "seconds", ...metricNames].find((k) => k === name || k.endsWith(`.${name}`) || k.endsWith(`/${name}`));
    const value = name === "status" ? r.status : D.keys.includes(full) ? r.values[full] : full ? dimension(r, full) : undefined;
    if (value === undefined || value === null) return false;
    if (sign === "=") return valueText(value) === wanted || String(value) === wanted || Number(value) === Number(wanted);
    const [a, b] = [Number(value), Number(wanted)];
    return sign === "<" ? a < b : sign === ">" ? a > b : sign === "<=" ? a <= b : a >= b;
  });
  const isListed = (i) => passes(runs[i], S.q);
  const isShown = (i) => !listOf(S.off).has(String(i)) && isListed(i);
  const isBrushed = (i) => [...brush()].every(([name, [low, high]]) => {
    const value = dimension(runs[i], name);
    return value !== null && value >= low && value <= high;
  });
  let hovered = null; // the run under the pointer, in every view
  const hover = (i) => { if (hovered !== i) { hovered = i; refresh(); } };
  const isHoverAlone = (view, name) => { // nothing else has changed: light the run up where it is shown
    for (const element of view.querySelectorAll("[data-run]")) element.classList.toggle("hover", Number(element.dataset.run) === hovered);
    return !changed(name, S.off, S.b, S.q, S.run, S.sort, S.g, S.px, S.py, innerWidth, theme());
  };

  // ---------------------------------------------------------------- the page and its sections
  const page = document.getElementById("page");
  page.replaceChildren();
  document.body.append(tip);
  const nav = h("nav", { "aria-label": "Sections" });
  const jump = (e, id) => { // the fragment is the state's
    e.preventDefault();
    const target = document.getElementById(id);
    target?.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    target?.focus({ preventScroll: true });
  };
  const section = (id, title, note, ...kids) => {
    nav.append(h("a", { href: `#${id}`, onclick: (e) => jump(e, id) }, title));
    const made = h("section", { id, tabindex: "-1", "aria-labelledby": `${id}-title` },
      h("header", {}, h("h2", { id: `${id}-title` }, title), note ? h("p", { class: "note" }, note) : null), kids);
    page.append(made);
    return made;
  };
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const setTheme = () => {
    const wanted = S.t || (isDark.matches ? "dark" : "light");
    if (document.documentElement.dataset.theme === wanted) return;
    document.documentElement.dataset.theme = wanted;
    themeButton.textContent = wanted === "dark" ? "☀ Light" : "☾ Dark";
    for (const chart of charts) chart.restyle();
  };
  const themeButton = h("button", { class: "quiet", id: "theme", "aria-label": "Switch between light and dark",
    onclick: () => set({ t: theme() === "dark" ? "light" : "dark" }) });
  const state = (status) => h("span", { class: `status ${status}` }, status);
  const copyButton = (text, label = "Copy") => h("button", { class: "quiet copy", "aria-label": `Copy: ${text}`, onclick: async (e) => {
    const button = e.currentTarget;
    try { await navigator.clipboard.writeText(text); } catch { // a page from disk may have no clipboard
      const area = document.body.appendChild(h("textarea", { value: text }));
      area.select(); document.execCommand("copy"); area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1500);
  } }, label);
  const command = (text) => h("div", { class: "command" }, h("code", {}, text), copyButton(text));
  document.body.prepend(h("div", { class: "top" }, h("a", { class: "skip", href: "#curves", onclick: (e) => jump(e, "curves") },
    "Skip to the curves"),
    h("div", { class: "bar" }, h("strong", {}, D.title), many ? null : state(runs[0].status), nav, themeButton)));
  const charts = [];

  // ---------------------------------------------------------------- overview
  const card = (label, value, note) => h("div", { class: "card" }, h("span", { class: "label" }, label), h("b", {}, value),
    h("small", {}, note || ""));
  const certainty = () => {
    const known = groups.map((g) => ({ g, values: samplesOf(g).map((i) => rank[i]).filter((v) => v !== null) })).filter((e) => e.values.length);
    const by = known.map((e) => ({ ...e, ...interval(e.values) })).sort((a, b) => better * (b.mean - a.mean));
    if (by.length < 2) return "";
    const [a, b] = by;
    if (Number.isNaN(a.half) || Number.isNaN(b.half)) return "one run each: not known whether it is chance; repeat with several seeds";
    const se = Math.hypot(a.spread / Math.sqrt(a.n), b.spread / Math.sqrt(b.n)), gap = Math.abs(a.mean - b.mean);
    const df = se ** 4 / ((a.spread ** 2 / a.n) ** 2 / (a.n - 1) + (b.spread ** 2 / b.n) ** 2 / (b.n - 1)); // Welch
    const t = T95[Math.max(0, Math.min(29, Math.floor(df) - 1))] ?? 1.96;
    const sure = se === 0 ? gap > 0 : gap > t * se;
    return `${sure ? "certain" : "not certain"} (95 %): ahead by ${fmt(gap, 3)} ± ${fmt(t * se, 2)} of ${nameOfGroup(b.g)}`;
  };
  {
    const r = runs[0], done = runs.filter((x) => x.status === "completed").length;
    const top = section("overview", "Overview", null);
    const bestOf = r.best[M], env = D.environment[0], limit = D.config[0].trainer?.max_steps;
    top.append(h("div", { class: "cards" }, many
      ? [card("Runs", fmt(runs.length), `${done} completed, ${runs.filter((x) => x.status === "failed").length} failed`),
        best < 0 ? card("Best", "–", `no run has ${M}`) : card(`Best ${M}`, fmt(rank[best]), runs[best].name),
        hasSeeds ? card("Is it certain?", ...(certainty().match(/^(.*?)(?: \(95 %\))?: (.*)$/) ?? ["", "–", ""]).slice(1)) : null,
        card("Time of all runs", duration(runs.reduce((a, x) => a + (x.seconds || 0), 0)), "without queues and restarts")]
      : [card(M, fmt(numeric(r.last[M])), bestOf ? `best ${fmt(bestOf.value)} at step ${fmt(bestOf.step)}` : "at its end"),
        card("Step", fmt(r.step), limit ? `of ${fmt(limit)}` : plural(r.samples || 0, "sample")),
        card("Time", duration(r.seconds), r.early_end || ""),
        card("Ranks", fmt(env.world_size ?? null), (env.hosts || []).join(", ")),
        card("Started", (env.started || "–").slice(0, 16).replace("T", " "), env.batch || "")]));
    const failures = runs.flatMap((x) => x.failures.map((text, n) => [x, text, x.status !== "failed" || n > 0]));
    for (const [x, text, isEarlier] of failures.slice(0, 8)) {
      const first = text.split("\n")[0].replace(/^The run failed/, isEarlier ? "An earlier attempt failed" : "The run failed");
      top.append(h("details", { class: `failure ${isEarlier ? "earlier" : ""}`, open: runs.length === 1 && !isEarlier },
        h("summary", {}, many ? `${x.name}: ` : "", first, !isEarlier && x.error ? `: ${x.error.split("\n")[0]}` : ""), h("pre", { tabindex: "0" }, text)));
    }
    if (failures.length > 8) top.append(h("p", { class: "note" },
      `${failures.length - 8} more failures: ddp-train status shows each run's.`));
    for (const x of runs) if (x.error && !x.failures.length) top.append(h("p", { class: "problem" }, `${x.name}: ${x.error}`));
    for (const x of runs) for (const problem of x.problems) top.append(h("p", { class: "problem" }, `${x.name}: ${problem}`));
    top.append(h("p", { class: "note" }, 
      `Made ${new Date(1000 * D.made).toISOString().slice(0, 16).replace("T", " ")} UTC by ddp-train report`,
      D.reload ? `; loads itself again every ${D.reload} s while the run goes on` : "", "."));
  }

  // ---------------------------------------------------------------- runs: table, groups over seeds
  if (many) {
    const columns = [["name", (r) => r.name, "Run"], ["status", (r) => r.status, "Status"],
      ...D.keys.map((k) => [k, (r) => (LEVELS[k] ? valueText(r.values[k]) : r.values[k]), short(k)]),
      [M, (r) => numeric(r.last[M]), M], ["best", (r) => numeric(r.best[M]?.value), `best ${M}`],
      ...(M === "train/loss" ? [] : [["train/loss", (r) => numeric(r.last["train/loss"]), "train/loss"]]),
      ["step", (r) => r.step, "Step"], ["seconds", (r) => r.seconds, "Time"]];
    const body = h("tbody"), head = h("tr"), chips = h("p", { class: "chips" }), told = h("span", { class: "note", "aria-live": "polite" });
    const filter = h("input", { type: "search", id: "filter", placeholder: "Filter: words, lr>0.001, status=failed",
      "aria-label": "Filter runs", oninput: (e) => set({ q: e.target.value }) });
    section("runs", "Runs", "Uncheck a run, filter, or brush an axis below: every view follows.",
      h("div", { class: "tools" }, filter, hasSeeds ? h("label", { class: "check" }, h("input", { type: "checkbox", id: "group",
        onchange: (e) => set({ g: e.target.checked ? 1 : 0 }) }), "Group over seeds") : null, told), chips,
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of runs" },
        h("table", { class: "runs" }, h("thead", {}, head), body)));
    const sorted = () => {
      const [name, direction] = (S.sort || `${M}~${better > 0 ? "d" : "a"}`).split("~");
      const column = columns.find((c) => c[0] === name) || columns[0];
      const sign = direction === "d" ? -1 : 1, rows = runs.map((_, i) => i).filter(isListed);
      return { name, direction, rows: rows.sort((a, b) => {
        const [x, y] = [column[1](runs[a]), column[1](runs[b])];
        if (x === null || x === undefined || y === null || y === undefined) return (x ?? null) === (y ?? null) ? a - b
          : (x ?? null) === null ? 1 : -1;
        return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y))) || a - b;
      }) };
    };
    const summary = h("div");
    if (hasSeeds) document.getElementById("runs").append(h("h3", {}, `${M}, mean over seeds`), summary);
    updates.push(() => {
      if (isHoverAlone(body, "table")) return;
      const { name, direction, rows } = sorted();
      if (document.activeElement !== filter) filter.value = S.q;
      const box = document.getElementById("group");
      if (box) box.checked = Boolean(S.g);
      const held = document.activeElement?.dataset?.held;
      head.replaceChildren(h("th", { class: "pick" }, h("input", { type: "checkbox", "aria-label": "Show all runs", "data-held": "all",
        checked: !S.off, onchange: (e) => set({ off: e.target.checked ? "" : runs.map((_, i) => i).join(",") }) })),
      ...columns.map(([key, , label]) => h("th", { "aria-sort": key === name ? (direction === "d" ? "descending" : "ascending") : "none" },
        h("button", { "data-held": `sort ${key}`, title: key,
          onclick: () => set({ sort: `${key}~${key === name && direction === "a" ? "d" : "a"}` }) },
          label, h("i", {}, key === name ? (direction === "d" ? " ↓" : " ↑") : "")))));
      const count = rows.filter((i) => isShown(i) && isBrushed(i)).length;
      told.textContent = count === runs.length ? `${runs.length} runs` : `${count} of ${runs.length} runs`;
      body.replaceChildren(...rows.map((i) => {
        const r = runs[i];
        return h("tr", { class: [isShown(i) && isBrushed(i) ? "" : "dim", i === S.run ? "current" : ""].join(" "), "data-run": i,
          onmouseenter: () => hover(i), onmouseleave: () => hover(null) },
        h("td", { class: "pick" }, h("input", { type: "checkbox", checked: !listOf(S.off).has(String(i)), "aria-label": `Show ${r.name}`,
          "data-held": `pick ${i}`, onchange: () => set({ off: toggled(S.off, i) }) }), swatch(colorOf(i))),
        columns.map(([key, of]) => {
          const value = of(r);
          if (key === "name") return h("td", {}, h("button",
            { class: "link", "data-held": `run ${i}`, title: r.folder, "aria-pressed": String(i === S.run),
            onclick: () => set({ run: i }) }, r.name), i === best ? h("span", { class: "star", title: "the best" }, " ★") : null);
          if (key === "status") return h("td", {}, state(value));
          return h("td", { class: typeof value === "number" ? "number" : "" }, key === "seconds" ? duration(value) : valueText(value));
        }));
      }));
      if (held) document.querySelector(`[data-held="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
      chips.replaceChildren(...[...brush()].map(([key, [low, high]]) => h("button", { class: "chip", title: "Remove this brush",
        onclick: () => setBrush({ [key]: null }) }, LEVELS[key]
        ? `${short(key)}: ${LEVELS[key].filter((_, n) => n >= low && n <= high).join(", ")} ×`
          : `${short(key)}: ${fmt(low, 4)} to ${fmt(high, 4)} ×`)));
      if (!hasSeeds) return;
      const by = groups.map((g) => ({ g, ...interval(samplesOf(g).filter((i) => isShown(i)
        && isBrushed(i)).map((i) => rank[i]).filter((v) => v !== null)) }))
        .filter((e) => e.n).sort((a, b) => better * (b.mean - a.mean));
      const [low, high] = [Math.min(...by.flatMap((e) => samplesOf(e.g).map((i) => rank[i] ?? Infinity))),
        Math.max(...by.flatMap((e) => samplesOf(e.g).map((i) => rank[i] ?? -Infinity)))];
      const room = (high - low || 1) * 0.25;
      const x = (v) => `${Math.min(100, Math.max(0, (100 * (v - low + room)) / (high - low + 2 * room || 1)))}%`;
      summary.replaceChildren(h("div", { class: "groups" }, by.map((e) => h("div", { class: "group" }, h("span", {}, nameOfGroup(e.g)),
        h("span", { class: "number" }, `${fmt(e.mean)}${Number.isNaN(e.half) ? "" : ` ± ${fmt(e.half, 2)}`}`),
          h("span", { class: "note" }, plural(e.n, "run")),
        h("span", { class: "whisker", "aria-hidden": "true" },
          Number.isNaN(e.half) ? null : h("i", { class: "line",
            style: `left:${x(e.mean - e.half)};right:calc(100% - ${x(e.mean + e.half)})` }),
          samplesOf(e.g).map((i) => rank[i] === null ? null : h("i", { class: "dot", style: `left:${x(rank[i])};background:${colorOf(i)}` })))))),
      h("p", { class: "note" }, "Dots are runs; the line is the 95 % interval of the mean by Student's t, cut at the edge. ", certainty()
        ? `The best is ${certainty()}.` : ""));
    });
  }

  // ---------------------------------------------------------------- what the metric depends on: one brush over all views
  const point = (e, element) => { const box = element.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top]; };
  const ticksOf = (low, high, n = 5) => {
    const raw = (high - low) / n || 1, power = 10 ** Math.floor(Math.log10(raw)),
      step = [1, 2, 5, 10].find((f) => f * power >= raw) * power;
    const ticks = [];
    for (let n = Math.ceil(low / step); n * step <= high + step * 1e-6 && ticks.length < 50; n++) ticks.push(+(n * step).toPrecision(12));
    return ticks;
  };
  const runTip = (e, i, ...more) => showTip(e.clientX, e.clientY, h("b", {}, swatch(colorOf(i)), runs[i].name),
    more.map((m) => h("div", {}, m)));
  if (runs.length > 2) {
    const dims = [...D.keys, M].filter((d) => runs.some((r) => dimension(r, d) !== null));
    if (dims.length === 1) dims.unshift("seconds");
    const scaleOf = (name) => { // value -> share of the axis, and back
      const values = runs.map((r) => dimension(r, name)).filter((v) => v !== null);
      let [low, high] = [Math.min(...values), Math.max(...values)];
      const isLog = !LEVELS[name] && low > 0 && high / low >= 8;
      const f = isLog ? Math.log10 : (v) => v, back = isLog ? (v) => 10 ** v : (v) => v;
      let [a, b] = [f(low), f(high)];
      const room = a === b ? 0.5 : 0;
      a -= room; b += room;
      const ticks = LEVELS[name] ? LEVELS[name].map((_, n) => n) : new Set(values).size <= 6 ? [...new Set(values)]
        : isLog ? [low, back((a + b) / 2), high] : [low, ...ticksOf(low, high, 4).filter((t) => t > low + (high - low) / 9
          && t < high - (high - low) / 9), high];
      return { share: (v) => (f(v) - a) / (b - a), value: (s) => back(a + s * (b - a)), ticks, low: back(a), high: back(b),
        distinct: [...new Set(values)].sort((x, y) => x - y) };
    };
    const scales = Object.fromEntries(dims.map((d) => [d, scaleOf(d)]));
    const drawing = svg("svg", { class: "parallel", role: "group", "aria-label": `Parallel coordinates of ${dims.join(", ")}` });
    section("parallel", "Parameters",
      "Drag along an axis to brush; click it to clear. By keyboard: arrows narrow the axis in focus, Escape clears.",
      h("div", { class: "panel" }, drawing));
    const H = 310, TOP = 58, BOTTOM = 30;
    const shared = {}; // runs with the same value on an axis of few: side by side
    for (const d of dims) for (const i of runs.keys()) {
      const v = dimension(runs[i], d), mates = scales[d].distinct.length > 6 ? [i]
        : runs.map((_, n) => n).filter((n) => dimension(runs[n], d) === v);
      shared[`${d} ${i}`] = (mates.indexOf(i) - (mates.length - 1) / 2) * Math.min(3, 26 / mates.length);
    }
    const y = (d, v) => TOP + (1 - scales[d].share(v)) * (H - TOP - BOTTOM);
    updates.push(() => {
      if (isHoverAlone(drawing, "parallel")) return;
      const W = drawing.parentElement.clientWidth - 24, pad = Math.min(70, W / (dims.length * 2 + 0.5));
      const x = (n) => pad + (n * (W - 2 * pad)) / Math.max(1, dims.length - 1);
      const held = document.activeElement?.dataset?.axis;
      drawing.onmousemove = (e) => { if (!e.target.dataset.run) { hover(null); hideTip(); } };
      drawing.setAttribute("viewBox", `0 0 ${W} ${H}`);
      drawing.setAttribute("height", H);
      const all = brush(), lines = runs.map((_, i) => i).filter(isShown).sort((a, b) => isBrushed(a) - isBrushed(b));
      drawing.replaceChildren(...lines.map((i) => {
        const places = dims.map((d, n) => [x(n), dimension(runs[i], d), d]).filter((p) => p[1] !== null).map(([px, v, d]) => [px,
          y(d, v) + shared[`${d} ${i}`]]);
        const path = places.map(([px, py], n) => {
          if (!n) return `M${px} ${py}`;
          const [qx, qy] = places[n - 1], middle = (px + qx) / 2;
          return `C${middle} ${qy} ${middle} ${py} ${px} ${py}`;
        }).join("");
        return svg("path", { d: path, class: `run ${isBrushed(i) ? "" : "dim"} `, stroke: colorOf(i),
          "data-run": i,
          onmousemove: (e) => { hover(i); runTip(e, i, dims.map((d) => `${short(d)}: ${dimensionText(runs[i], d)}`)); },
          onmouseleave: () => { hover(null); hideTip(); }, onclick: () => set({ run: i }) });
      }), ...dims.map((d, n) => {
        const scale = scales[d], range = all.get(d), px = x(n), last = n === dims.length - 1 && n > 0,
          width = Math.min(46, (W - 2 * pad) / dims.length);
        const limits = range ? [y(d, Math.min(scale.high, range[1])), y(d, Math.max(scale.low, range[0]))] : null;
        const name = short(d), most = Math.max(6, Math.floor((W / dims.length) / 6.6));
        const group = svg("g", { class: "axis", tabindex: "0", role: "slider", "data-axis": d, "aria-label": d, "aria-valuetext":
          range ? `${fmt(range[0], 4)} to ${fmt(range[1], 4)}` : "all", "aria-valuenow": range ? range[0] : scale.low,
            "aria-valuemin": scale.low, "aria-valuemax": scale.high },
        svg("title", {}, d), svg("line", { x1: px, x2: px, y1: TOP - 4, y2: H - BOTTOM + 4 }),
        svg("text", { x: px, y: n % 2 && W < 620 ? 14 : 28, "text-anchor": "middle", class: "name" }, name.length > most
          ? `…${name.slice(1 - most)}` : name),
        scale.ticks.map((t) => svg("text", { x: px + (last ? -7 : 7),
          y: y(d, t) - 6 - (scale.distinct.length > 6 ? 0 : Math.min(13, runs.length)), "text-anchor": last ? "end" : "start",
            class: "tick" },
          (LEVELS[d] ? LEVELS[d][t] : fmt(t, 4)).slice(0, Math.max(4, Math.floor((x(1) - x(0)) / 7) || 20)))),
        limits ? svg("rect", { class: "brush", x: px - 9, width: 18, y: limits[0] - 3, height: Math.max(6, limits[1] - limits[0] + 6) })
          : null,
        svg("rect", { class: "hit", x: px - width / 2, y: TOP - 8, width, height: H - TOP - BOTTOM + 16 }));
        const valueAt = (e) => scale.value(Math.min(1.02, Math.max(-0.02,
          1 - (point(e, drawing)[1] * (H / drawing.getBoundingClientRect().height) - TOP) / (H - TOP - BOTTOM))));
        group.addEventListener("pointerdown", (e) => {
          const from = valueAt(e), startY = e.clientY;
          let moved = false;
          const move = (m) => {
            if (Math.abs(m.clientY - startY) < 4) return;
            moved = true;
            const [lo, hi] = [from, valueAt(m)].sort((a, b) => a - b);
            setBrush({ [d]: [lo, hi] });
          };
          addEventListener("pointermove", move);
          addEventListener("pointerup", () => { removeEventListener("pointermove", move); if (!moved) setBrush({ [d]: null }); },
            { once: true });
          e.preventDefault();
          group.focus();
        });
        group.addEventListener("keydown", (e) => {
          const values = scale.distinct, [lo, hi] = brush().get(d) || [values[0], values.at(-1)];
          const [a, b] = [values.findIndex((v) => v >= lo - 1e-12), values.findLastIndex((v) => v <= hi + 1e-12)];
          const next = { ArrowUp: [a + 1, b], ArrowDown: [a, b - 1], ArrowRight: [a - 1, b], ArrowLeft: [a, b + 1] }[e.key];
          if (e.key === "Escape") { setBrush({ [d]: null }); e.stopPropagation(); } else if (!next) return;
          else if (next[0] <= next[1] && values[next[0]] !== undefined && values[next[1]] !== undefined) {
            const slack = 1e-6 * Math.abs(values.at(-1) - values[0]);
            setBrush({ [d]: [values[next[0]] - slack, values[next[1]] + slack] });
          }
          e.preventDefault();
        });
        return group;
      }));
      if (held) drawing.querySelector(`[data-axis="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
    });

    // importance, and rank correlation of keys that are numbers (Spearman)
    const ranks = (values) => {
      const sorted = [...values].sort((a, b) => a - b);
      return values.map((v) => (sorted.indexOf(v) + sorted.lastIndexOf(v)) / 2);
    };
    const correlation = (key) => {
      const pairs = runs.map((r) => [dimension(r, key), dimension(r, M)]).filter(([a, b]) => a !== null && b !== null);
      if (LEVELS[key] || pairs.length < 4) return null;
      const [a, b] = [ranks(pairs.map((p) => p[0])), ranks(pairs.map((p) => p[1]))],
        [ma, mb] = [a, b].map((v) => v.reduce((s, w) => s + w, 0) / v.length);
      const sum = (f) => a.reduce((s, _, i) => s + f(a[i] - ma, b[i] - mb), 0), d = Math.sqrt(sum((p) => p * p) * sum((p, q) => q * q));
      return d ? sum((p, q) => p * q) / d : null;
    };
    const hasShares = Object.keys(D.importance).length > 0;
    const weight = Object.fromEntries(D.settings.map((k) => [k, hasShares ? D.importance[k] ?? 0 : correlation(k)]));
    const keys = D.settings.filter((k) => new Set(runs.map((r) => valueText(r.values[k]))).size > 1);
    keys.sort((a, b) => Math.abs(weight[b] ?? 0) - Math.abs(weight[a] ?? 0));
    const bar = (v) => h("span", { class: "bar", "aria-hidden": "true" }, h("i", { style: hasShares ? `left:0;width:${100 * v}%`
      : `left:${50 + Math.min(0, v) * 50}%;width:${Math.abs(v) * 50}%` }));
    const importance = h("div", { class: "panel" }, h("h3", {}, `What ${M} depends on`), h("div", { class: "bars" },
      h("span", { class: "note" }, "key"), h("span", { class: "note" }, hasShares ? "importance (PED-ANOVA)" : "rank correlation"),
      keys.map((k) => [h("span", { title: k }, short(k)),
        h("span", {}, weight[k] === null ? "–" : [bar(weight[k]), hasShares ? percent(weight[k]) : fmt(weight[k], 2)])])),
    hasShares ? null : h("p", { class: "note" }, "Where Optuna 3.6 or newer is installed, its importance of keys (PED-ANOVA) is here."));

    // Pareto front of two metrics
    const choices = [...new Set([M, "seconds", ...metricNames,
      ...D.keys.filter((k) => !LEVELS[k])])].filter((n) => runs.some((r) => dimension(r, n) !== null));
    const plot = svg("svg", { class: "pareto", role: "img" }), pickers = h("div", { class: "tools" });
    section("pareto", "Trade-offs", "No other run is better in both metrics than one on the line. Drag a rectangle to brush.",
      h("div", { class: "two" }, h("div", { class: "panel" }, pickers, plot), importance));
    updates.push(() => {
      if (isHoverAlone(plot, "pareto")) return;
      plot.onmousemove = (e) => { if (!e.target.dataset.run) { hover(null); hideTip(); } };
      const [nx, ny] = [choices.includes(S.px) ? S.px : choices.find((c) => c !== M) ?? M, choices.includes(S.py) ? S.py : M];
      pickers.replaceChildren(select("across", choices.map((c) => [c, short(c)]), nx, (v) => set({ px: v })),
        select("up", choices.map((c) => [c, short(c)]), ny, (v) => set({ py: v })));
      const W = Math.max(260, plot.parentElement.clientWidth - 24), PH = 280, L = 62, B = 40, [gx, gy] = [goalOf(nx), goalOf(ny)];
      plot.setAttribute("viewBox", `0 0 ${W} ${PH}`);
      plot.setAttribute("height", PH);
      plot.setAttribute("aria-label", `${ny} over ${nx} of each run, with the Pareto front`);
      const points = runs.map((r, i) => ({ i, a: dimension(r, nx), b: dimension(r, ny) })).filter((p) => p.a !== null && p.b !== null
        && isShown(p.i));
      if (!points.length) { plot.replaceChildren(svg("text", { x: 20, y: 40 }, "No run shown has both.")); return; }
      const extent = (values) => { const [lo, hi] = [Math.min(...values), Math.max(...values)],
        room = (hi - lo || Math.abs(hi) || 1) * 0.08; return [lo - room, hi + room]; };
      const [x0, x1] = extent(points.map((p) => p.a)), [y0, y1] = extent(points.map((p) => p.b));
      const px = (v) => L + ((v - x0) / (x1 - x0)) * (W - L - 14), py = (v) => 12 + (1 - (v - y0) / (y1 - y0)) * (PH - 12 - B);
      const front = points.filter((p) => !points.some((q) => (gx * (q.a - p.a) >= 0 && gy * (q.b - p.b) >= 0)
        && (q.a !== p.a || q.b !== p.b)))
        .sort((p, q) => p.a - q.a || p.b - q.b);
      const line = front.map((p, n) => (n ? (gx * gy > 0 ? `V${py(p.b)}H${px(p.a)}` : `H${px(p.a)}V${py(p.b)}`)
        : `M${px(p.a)} ${py(p.b)}`)).join("");
      const all = brush(), [bx, by] = [all.get(nx) || [x0, x1], all.get(ny) || [y0, y1]];
      const area = svg("rect", { class: "hit", x: L, y: 12, width: W - L - 14, height: PH - 12 - B });
      plot.replaceChildren(...ticksOf(x0, x1).map((t) => [svg("line", { class: "grid", x1: px(t), x2: px(t), y1: 12, y2: PH - B }),
        svg("text", { class: "tick", x: px(t), y: PH - B + 16, "text-anchor": "middle" }, fmt(t, 4))]).flat(),
      ...ticksOf(y0, y1).map((t) => [svg("line", { class: "grid", x1: L, x2: W - 14, y1: py(t), y2: py(t) }),
        svg("text", { class: "tick", x: L - 6, y: py(t) + 4, "text-anchor": "end" }, fmt(t, 4))]).flat(),
      svg("text", { class: "name", x: W - 14, y: PH - 6, "text-anchor": "end" }, `${nx} (${gx > 0 ? "more" : "less"} is better)`),
      svg("text", { class: "name", x: 4, y: PH - 6 }, `↑ ${ny} (${gy > 0 ? "more" : "less"})`), area,
      all.has(nx) || all.has(ny) ? svg("rect", { class: "brush", x: Math.max(L, px(bx[0])), y: Math.max(12, py(by[1])),
        width: Math.max(2, Math.min(W - 14, px(bx[1])) - Math.max(L, px(bx[0]))),
          height: Math.max(2, Math.min(PH - B, py(by[0])) - Math.max(12, py(by[1]))) }) : "",
      svg("path", { class: "front", d: line }), ...points.map((p) => svg("circle",
        { cx: px(p.a), cy: py(p.b), r: 5, fill: colorOf(p.i),
        class: isBrushed(p.i) ? "" : "dim", "data-run": p.i,
          onmousemove: (e) => { hover(p.i); runTip(e, p.i, `${nx}: ${fmt(p.a)}`, `${ny}: ${fmt(p.b)}`); },
        onmouseleave: () => { hover(null); hideTip(); }, onclick: () => set({ run: p.i }) })));
      area.onpointerdown = (e) => {
        const at = (m) => { const [qx, qy] = point(m, plot);
          return [x0 + ((qx - L) / (W - L - 14)) * (x1 - x0), y0 + (1 - (qy - 12) / (PH - 12 - B)) * (y1 - y0)]; };
        const from = at(e);
        let moved = false;
        const move = (m) => {
          if (Math.hypot(m.clientX - e.clientX, m.clientY - e.clientY) < 5) return;
          moved = true;
          const to = at(m);
          setBrush({ [nx]: [Math.min(from[0], to[0]), Math.max(from[0], to[0])],
            [ny]: [Math.min(from[1], to[1]), Math.max(from[1], to[1])] });
        };
        addEventListener("pointermove", move);
        addEventListener("pointerup", () => { removeEventListener("pointermove", move); if (!moved) setBrush({ [nx]: null, [ny]: null });
          }, { once: true });
        e.preventDefault();
      };
    });
  }

  // ---------------------------------------------------------------- curves
  const cache = new Map();
  const remember = (key, make) => { if (cache.size > 5000) cache.clear(); if (!cache.has(key)) cache.set(key, make());
    return cache.get(key); };
  const axisOf = (r, split) => (r.axes[split][S.x] ? S.x : "step");
  const placeOf = (r, split) => { // step -> its place on the horizontal axis
    const axes = r.axes[split], axis = axisOf(r, split), steps = numbers(axes.step), line = { x: steps, y: numbers(axes[axis]) };
    if (axis === "step") return (step) => step;
    const at = (step) => linear(line, Math.min(Math.max(step, steps[0]), steps[steps.length - 1]));
    return axis === "samples" ? (step) => Math.round(at(step)) : at;
  };
  const curve = (i, key) => remember(`${i} ${key} ${S.x} ${S.s}`, () => {
    const c = runs[i].curves[key];
    if (!c) return null;
    let step = 0;
    const steps = Float64Array.from(numbers(c.steps), (d) => (step += d)), raw = numbers(c.y);
    const x = steps.map(placeOf(runs[i], key.split("/")[0])), interval = (step - steps[0]) / (c.n - 1);
    let y = raw;
    if (S.s > 0) { // a debiased mean that forgets by records, so that leaving some out changes little; a NaN stays one
      let mean = 0, weight = 0;
      y = Float64Array.from(raw, (v, n) => {
        if (Number.isNaN(v)) return NaN;
        const keep = S.s ** (n ? (steps[n] - steps[n - 1]) / interval : 1);
        mean = keep * mean + (1 - keep) * v; weight = keep * weight + (1 - keep);
        return mean / weight;
      });
    }
    return { x, y, raw };
  });
  const nearest = (x, value) => {
    let [a, b] = [0, x.length - 1];
    while (b - a > 1) { const middle = (a + b) >> 1; if (x[middle] <= value) a = middle; else b = middle; }
    return value - x[a] <= x[b] - value ? a : b;
  };
  const linear = (line, value, y = line.y) => { // NaN beside a NaN, null outside
    const { x } = line, n = x.length;
    if (!n || value < x[0] || value > x[n - 1]) return null;
    let [a, b] = [0, n - 1];
    while (b - a > 1) { const middle = (a + b) >> 1; if (x[middle] <= value) a = middle; else b = middle; }
    if (value === x[a] || a === b) return y[a];
    return value === x[b] ? y[b] : y[a] + ((value - x[a]) * (y[b] - y[a])) / (x[b] - x[a]);
  };
  const band = (g, key) => remember(`band ${g[0]} ${key} ${S.x} ${S.s} ${S.off} ${S.q} ${S.b}`,
    () => { // the mean of a group's runs with its interval, where the longest one has points
    const lines = (samplesOf(g).length ? samplesOf(g) : g).filter((i) => isShown(i) && isBrushed(i)).map((i) => curve(i, key)).filter(Boolean);
    if (!lines.length) return null;
    const { x } = lines.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const y = new Float64Array(x.length), low = new Float64Array(x.length), high = new Float64Array(x.length);
    x.forEach((at, n) => {
      const values = lines.map((l) => linear(l, at)).filter((v) => v !== null), e = interval(values);
      y[n] = e.mean; low[n] = e.mean - e.half; high[n] = e.mean + e.half;
    });
    return { x, y, raw: y, low, high, n: lines.length };
  });
  const names = [...new Set(runs.flatMap((r) => Object.keys(r.curves)))];
  const rate = (n) => /per_s|_ms|wait|_gib|mfu|device\//.test(n);
  const importanceOf = (n) => (n.endsWith("/loss") && !n.slice(0, -5).includes("/") ? 0 : n === M ? 1 : n.startsWith("eval/") ? 2 : rate(n)
    ? 4 : 3);
  names.sort((a, b) => importanceOf(a) - importanceOf(b));
  const panels = [];
  for (const name of names) { // train and eval of one name share a panel
    const base = name.replace(/^(train|eval)\//, ""), known = panels.find((p) => p.base === base && !rate(name));
    if (known) known.keys.push(name); else panels.push({ base, keys: [name] });
  }
  const MARKS = { spike: "1", skipped: "3", nonfinite: "1", rewound: "0", restart: "6", resume: "6", failure: "1", stop: "7",
    slow_rank: "5", waits_for_data: "5", checkpoint: "7" };
  const markKinds = [...new Set(runs.flatMap((r) => r.marks.map((m) => m.kind)))];
  const markHue = (kind) => hue(Number(MARKS[kind] ?? 4));
  const GLYPH = { spike: "▲", skipped: "⤼", nonfinite: "✕", rewound: "⟲", restart: "↻", resume: "↻", failure: "✕", stop: "■",
    slow_rank: "◔", waits_for_data: "…", checkpoint: "◆" };
  const markedRun = () => (many ? hovered ?? S.run : 0);
  const marksAt = (i) => remember(`marks ${i} ${S.x}`, () => {
    const axes = runs[i].axes, split = axes.train ? "train" : Object.keys(axes)[0];
    if (!split) return [];
    const place = placeOf(runs[i], split);
    return runs[i].marks.map((m) => ({ ...m, x: place(m.step), from: m.kind === "rewound" && m.text.match(/from_step (\d+)/)
      ? place(Number(m.text.match(/from_step (\d+)/)[1])) : null }));
  });
  const shownMarks = () => { const off = listOf(S.k); return marksAt(markedRun()).filter((m) => !off.has(m.kind)); };
  const domain = () => remember(`domain ${S.x} ${S.lx} ${S.off} ${S.q}`, () => {
    let [low, high] = [Infinity, -Infinity];
    runs.forEach((r, i) => { if (isShown(i)) for (const key of Object.keys(r.curves)) {
      const { x } = curve(i, key);
      const first = S.lx ? x.find((v) => v > 0) : x[0];
      if (first !== undefined) { low = Math.min(low, first); high = Math.max(high, x[x.length - 1]); }
    } });
    return low < high ? [low, high] : low === high ? (S.lx ? [low / 2, low * 2] : [low - 1, low + 1]) : [1, 2];
  });
  const axisWords = { step: "step", samples: "samples", epoch: "epoch", time: "time since the first record" };
  const xText = (x) => (S.x === "time" ? duration(x) : fmt(x, 6));
  const decades = (low, high) => { // ticks of a logarithmic axis
    const span = Math.log10(high / low);
    if (span < 0.7) return ticksOf(low, high, 4);
    const factors = span < 1.6 ? [1, 2, 5] : span < 3 ? [1, 3] : [1], every = Math.ceil(span / 6), ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high);
      e++) if (e % every === 0) for (const f of factors) ticks.push(f * 10 ** e);
    return ticks.filter((t) => t >= low && t <= high);
  };
  class Chart {
    constructor(panel) {
      this.panel = panel;
      this.readout = h("span", { class: "readout", "aria-live": "off" });
      this.scaleNote = h("small");
      this.box = h("div", { class: "plot" });
      const label = panel.keys.length > 1 ? panel.base : panel.keys[0];
      this.root = h("figure", { class: "panel chart", tabindex: "0", "data-panel": label,
        "aria-label": `${label}: curve; arrows move, plus and minus zoom, Escape resets`,
        onkeydown: (e) => this.key(e), onpointerleave: () => this.leave(), onblur: () => this.leave() },
      h("figcaption", {}, h("b", {}, label), panel.keys.length > 1 ? h("small", {}, " train –, eval ┄") : null, this.scaleNote,
        this.readout), this.box);
      this.dirty = true; this.seen = false;
    }
    lines() {
      const made = [];
      for (const key of this.panel.keys) {
        const dash = this.panel.keys.length > 1 && key.startsWith("eval/");
        if (S.g && hasSeeds) {
          groups.forEach((g, n) => { const line = band(g, key);
            if (line) made.push({ ...line, key, dash, group: n, run: g[0], color: groups.length <= 8 ? hue(n) : colorOf(g[0]),
              name: nameOfGroup(g) }); });
        } else {
          runs.forEach((r, i) => { const line = isShown(i) ? curve(i, key) : null;
            if (line) made.push({ ...line, key, dash, run: i, color: many ? colorOf(i) : hue(dash ? 1 : 0), name: r.name }); });
        }
      }
      return made;
    }
    update() {
      if (!this.seen) { this.dirty = true; return; }
      this.dirty = false;
      const key = JSON.stringify([S.x, S.s, S.ly, S.lx, S.z, S.off, S.b, S.q, S.g, theme(), this.box.clientWidth, devicePixelRatio]);
      if (key === this.drawn && this.u) { this.u.redraw(false, false); return; } // another run is under the pointer, no more
      this.drawn = key; this.base = null;
      this.shown = this.lines();
      this.log = Boolean(S.ly) && this.shown.every((line) => remember(`positive ${line.run} ${line.key}`,
        () => !runs[line.run].curves[line.key] || numbers(runs[line.run].curves[line.key].y).every((v) => !(v <= 0))));
      this.scaleNote.textContent = S.ly && !this.log ? " linear: has values of 0 or less" : "";
      const width = this.box.clientWidth;
      if (!width) { this.dirty = true; return; }
      const kind = `${S.lx}${this.log}${S.x}${theme()}`;
      if (this.kind !== kind) { this.u?.destroy(); this.u = null; this.kind = kind; }
      if (!this.u) this.make(width);
      if (this.u.width !== width) this.u.setSize({ width, height: this.height(width) });
      const [x0, x1] = zoom() || domain();
      this.x = S.lx ? [Math.max(x0, 1e-9), x1] : [x0, x1];
      this.y = this.range();
      this.u.batch(() => { this.u.setScale("x", { min: this.x[0], max: this.x[1] });
        this.u.setScale("y", { min: this.y[0], max: this.y[1] }); this.u.redraw(false, true); });
    }
    height(width) { return innerHeight < 500 ? 180 : Math.round(Math.min(240, Math.max(180, width * 0.5))); }
    range() {
      let [low, high] = [Infinity, -Infinity];
      for (const line of this.shown) {
        if (many && line.group === undefined && !isBrushed(line.run)) continue;
        const n = line.x.length;
        let begin = nearest(line.x, this.x[0]), end = nearest(line.x, this.x[1]);
        begin = Math.max(0, begin - (line.x[begin] > this.x[0] ? 1 : 0)); end = Math.min(n - 1, end + (line.x[end] < this.x[1] ? 1 : 0));
        for (let i = begin; i <= end; i++) {
          const [v, w] = S.s ? [line.y[i], line.raw[i]] : [line.raw[i], line.raw[i]];
          if (v < low) low = v; if (w < low) low = w; if (v > high) high = v; if (w > high) high = w;
        }
      }
      if (!(low <= high)) return this.log ? [0.1, 1] : [0, 1];
      if (this.log) return high / low < 1.02 ? [low / 1.2, high * 1.2] : [low * (low / high) ** 0.04, high * (high / low) ** 0.04];
      const size = Math.max(Math.abs(low), Math.abs(high)), room = (high - low > 1e-6 * size ? high - low : size * 0.1 || 1) * 0.06;
      return [low - room, high + room];
    }
    make(width) {
      const ink = css("--muted"), grid = css("--grid"), font = "11px system-ui, sans-serif";
      const axis = { stroke: ink, font, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 } };
      this.u = new uPlot({
        width, height: this.height(width), padding: [14, 24, 0, 0], legend: { show: false },
        scales: { x: { time: false, distr: S.lx ? 3 : 1, range: () => this.x || [1, 2] },
          y: { distr: this.log ? 3 : 1, range: () => this.y || [1, 2] } },
        series: [{}, { paths: () => null, points: { show: false } }],
        axes: [{ ...axis, size: 26, space: 70, ...(S.lx ? { splits: (u, _, low, high) => decades(low, high) } : {}),
          values: (u, ticks) => ticks.map((t) => (t === null ? "" : S.x === "time" ? duration(t) : fmt(t, 6))) },
          { ...axis, size: 58, space: 32, ...(this.log ? { splits: (u, _, low, high) => decades(low, high) } : {}),
            values: (u, ticks) => ticks.map((t) => (t === null ? "" : fmt(t, 4))) }],
        cursor: { drag: { x: true, y: false, setScale: false, dist: 4 }, points: { show: false },
          bind: { dblclick: () => () => { set({ z: "" }); return null; } } },
        hooks: { draw: [(u) => this.draw(u)], setCursor: [() => this.point()], setSelect: [(u) => this.zoomed(u)] },
      }, [[1, 2], [1, 2]], this.box);
    }
    draw(u) { // all lines once, as a picture; then the run under the pointer, and marks, above it
      if (!this.shown) return;
      const { ctx } = u, { left, top, width, height } = u.bbox, ratio = devicePixelRatio || 1;
      if (!this.base) {
        this.base = h("canvas", { width: ctx.canvas.width, height: ctx.canvas.height });
        this.strokes(this.base.getContext("2d"), u, this.shown, false);
      }
      const lit = !many || hovered === null ? []
        : this.shown.filter((line) => line.run === hovered || (line.group !== undefined && groupOf[hovered] === line.group));
      ctx.globalAlpha = lit.length ? 0.3 : 1; ctx.drawImage(this.base, 0, 0); ctx.globalAlpha = 1;
      this.strokes(ctx, u, lit, true);
      ctx.save();
      ctx.textAlign = "center"; ctx.font = `${10 * ratio}px system-ui, sans-serif`;
      for (const mark of shownMarks().filter((m) => m.x >= this.x[0] && m.x <= this.x[1])) {
        const at = u.valToPos(mark.x, "x", true);
        ctx.strokeStyle = ctx.fillStyle = markHue(mark.kind);
        if (mark.from !== null) {
          const end = Math.min(left + width, u.valToPos(mark.from, "x", true));
          ctx.globalAlpha = 0.13; ctx.fillRect(at, top, end - at, height); ctx.globalAlpha = 1;
        }
        if (mark.kind === "checkpoint") { ctx.globalAlpha = 0.7; ctx.fillText("◆", at, top + height - 2 * ratio); ctx.globalAlpha = 1;
          continue; }
        ctx.lineWidth = ratio; ctx.setLineDash([2 * ratio, 3 * ratio]); ctx.beginPath(); ctx.moveTo(at, top + 4 * ratio);
        ctx.lineTo(at, top + height); ctx.stroke(); ctx.setLineDash([]);
        ctx.fillText(GLYPH[mark.kind] ?? "•", at, top + 2 * ratio);
      }
      ctx.restore();
    }
    strokes(ctx, u, lines, isLit) {
      const { left, top, width, height } = u.bbox, ratio = devicePixelRatio || 1, bad = css("--bad");
      const fx = S.lx ? Math.log10 : (v) => v, fy = this.log ? Math.log10 : (v) => v;
      const [x0, x1] = this.x.map(fx), [y0, y1] = this.y.map(fy);
      const px = (v) => left + ((fx(v) - x0) / (x1 - x0)) * width, py = (v) => top + (1 - (fy(v) - y0) / (y1 - y0)) * height;
      ctx.save();
      ctx.beginPath(); ctx.rect(left - 4 * ratio, top - 12 * ratio, width + 8 * ratio, height + 13 * ratio); ctx.clip();
      ctx.lineJoin = "bevel";
      const trace = (x, y, offset) => {
        const begin = Math.max(0, nearest(x, this.x[0]) - 1), end = Math.min(x.length - 1, nearest(x, this.x[1]) + 1);
        let open = false;
        for (let i = begin; i <= end; i++) {
          if (!(y[i] > (this.log ? 0 : -Infinity)) || (S.lx && !(x[i] > 0))) { open = false; continue; }
          const [a, b] = [px(x[i]), py(y[i])];
          if (open) ctx.lineTo(a, b); else { ctx.moveTo(a, b); if (!(y[i + 1] > -Infinity)) ctx.lineTo(a + ratio, b); }
          open = true;
        }
        if (end - begin <= 20 && offset) for (let i = begin; i <= end;
          i++) if (y[i] > (this.log ? 0 : -Infinity)) { ctx.moveTo(px(x[i]) + offset, py(y[i])); ctx.arc(px(x[i]), py(y[i]), offset, 0, 7);
          }
      };
      for (const line of lines) {
        ctx.globalAlpha = many && line.group === undefined && !isLit && !isBrushed(line.run) ? 0.07 : 1;
        ctx.strokeStyle = ctx.fillStyle = line.color;
        if (line.low && !rate(line.key)) {
          ctx.save(); ctx.globalAlpha *= 0.12; ctx.beginPath();
          let from = -1;
          for (let i = 0; i <= line.x.length; i++) {
            const inside = i < line.x.length && !Number.isNaN(line.low[i]);
            if (inside && from < 0) from = i;
            if (!inside && from >= 0) {
              const floor = (v) => (this.log && !(v > 0) ? top + height : py(v));
              for (let k = from; k < i; k++) ctx[k === from ? "moveTo" : "lineTo"](px(line.x[k]), py(line.high[k]));
              for (let k = i - 1; k >= from; k--) ctx.lineTo(px(line.x[k]), floor(line.low[k]));
              ctx.closePath(); from = -1;
            }
          }
          ctx.fill(); ctx.restore();
        }
        if (S.s > 0 && line.raw !== line.y && runs.length <= 8) { ctx.save(); ctx.globalAlpha *= 0.25; ctx.lineWidth = ratio;
          ctx.beginPath(); trace(line.x, line.raw, 0); ctx.stroke(); ctx.restore(); }
        ctx.lineWidth = (isLit ? 2.6 : runs.length > 16 ? 1 : 1.6) * ratio;
        ctx.setLineDash(line.dash ? [5 * ratio, 3 * ratio] : []);
        ctx.beginPath(); trace(line.x, line.y, line.dash ? 0 : 2 * ratio); ctx.stroke();
        ctx.setLineDash([]);
        ctx.fillStyle = bad; // each NaN, or the first and the last of a long one, at the top
        for (let i = 0; i < line.raw.length; i++) if (Number.isNaN(line.raw[i]) && line.x[i] >= this.x[0] && line.x[i] <= this.x[1]) {
          const next = i + 1 < line.raw.length && Number.isNaN(line.raw[i + 1]) ? px(line.x[i + 1]) - px(line.x[i]) : 0;
          ctx.fillRect(px(line.x[i]) - 1.5 * ratio, top, Math.max(3 * ratio, next), 5 * ratio);
        }
      }
      ctx.restore();
    }
    zoomed(u) {
      if (u.select.width < 5) return;
      const [a, b] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
      u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      set({ z: `${+a.toPrecision(7)}~${+b.toPrecision(7)}` });
    }
    point() {
      if (Chart.silent || !this.u || !this.shown) return;
      const { left, top } = this.u.cursor;
      if (left === undefined || left < 0) return;
      const x = this.u.posToVal(left, "x");
      const found = this.shown.map((line) => {
        const n = nearest(line.x, x);
        return { line, n, off: Math.abs(this.u.valToPos(line.x[n], "x") - left), y: this.u.valToPos(line.y[n], "y") };
      }).filter((f) => f.off < 60 || f.line.x.length < 80).sort((a, b) => (top < 0 ? 0 : Math.abs(a.y - top) - Math.abs(b.y - top)));
      const first = found.find((f) => !Number.isNaN(f.y));
      if (many && top >= 0) hover(first && Math.abs(first.y - top) < 40 ? first.line.run : null);
      const box = this.u.over.getBoundingClientRect();
      const at = found.length ? found[0].line.x[found[0].n] : x;
      const marks = shownMarks().filter((m) => Math.abs(this.u.valToPos(m.x, "x") - left) < 7);
      const rows = found.slice(0, 8).map(({ line, n }) => h("div", { class: "row" }, swatch(line.color),
        h("span", {}, many ? line.name : line.key),
        many && this.panel.keys.length > 1 ? h("small", {}, line.key.split("/")[0]) : null,
        h("b", { "data-value": line.raw[n], "data-x": line.x[n], "data-key": line.key, "data-run": line.run }, fmt(line.raw[n], 7)),
        S.s > 0 && !line.low ? h("small", {}, `mean ${fmt(line.y[n])}`) : null,
        line.low && !Number.isNaN(line.low[n]) ? h("small", {}, `± ${fmt(line.high[n] - line.y[n], 3)}, ${line.n} runs`) : null));
      showTip(box.left + left, box.top + Math.max(0, top < 0 ? box.height / 2 : top),
        h("div", { class: "at" }, `${axisWords[S.x]} ${xText(at)}`), rows,
        found.length > 8 ? h("small", {}, `and ${found.length - 8} more`) : null,
        marks.slice(0, 5).map((m) => h("div", { class: "row" }, h("i", { style: `color:${markHue(m.kind)}` }, GLYPH[m.kind] ?? "•"),
          h("span", {}, `${m.kind.replaceAll("_", " ")} at step ${fmt(m.step)}: ${m.text}`))));
      Chart.silent = true;
      for (const other of charts) {
        if (!other.u || !other.seen || !other.shown) continue;
        if (other !== this) other.u.setCursor({ left: other.u.valToPos(x, "x"), top: -10 }, false);
        const lines = other.shown.filter((l) => (many ? l.run === (first?.line.run ?? S.run) : true));
        other.readout.textContent = lines.slice(0, 2).map((l) => fmt(l.raw[nearest(l.x, x)])).join(" · ");
      }
      Chart.silent = false;
    }
    leave() {
      hideTip(); hover(null);
      Chart.silent = true;
      for (const chart of charts) { chart.readout.textContent = ""; chart.u?.setCursor({ left: -10, top: -10 }, false); }
      Chart.silent = false;
    }
    key(e) {
      if (!this.u || !this.shown?.length) return;
      const line = this.shown[0], [x0, x1] = this.x, wide = x1 - x0;
      const at = this.u.cursor.left >= 0 ? this.u.posToVal(this.u.cursor.left, "x") : (x0 + x1) / 2, n = nearest(line.x, at);
      const go = (i) => {
        const x = line.x[Math.max(0, Math.min(line.x.length - 1, i))];
        if (x < x0 || x > x1) set({ z: `${x - wide / 2}~${x + wide / 2}` });
        else { this.u.setCursor({ left: this.u.valToPos(x, "x"), top: -1 }); }
      };
      const grow = (f) => { const [lo, hi] = domain(), a = Math.max(lo, at - (at - x0) * f), b = Math.min(hi, at + (x1 - at) * f);
        set({ z: a <= lo && b >= hi ? "" : `${+a.toPrecision(7)}~${+b.toPrecision(7)}` }); };
      if (e.key === "ArrowRight") go(n + 1); else if (e.key === "ArrowLeft") go(n - 1);
      else if (e.key === "Home") go(0); else if (e.key === "End") go(line.x.length - 1);
      else if (e.key === "+" || e.key === "=") grow(0.5); else if (e.key === "-") grow(2);
      else return;
      e.preventDefault();
    }
    restyle() { this.dirty = true; this.drawn = ""; if (this.seen) this.update(); }
  }
  Chart.silent = false;
  if (names.length) {
    const has = (axis) => runs.some((r) => Object.values(r.axes).some((a) => a[axis]));
    const segments = h("div", { class: "segments", role: "radiogroup", "aria-label": "Horizontal axis" },
      ["step", "samples", "epoch", "time"].filter(has).map((axis) =>
      h("button", { role: "radio", "data-axis-name": axis, onclick: () => set({ x: axis, z: "" }) }, axis === "time" ? "wall time"
        : axis)));
    const slider = h("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, "aria-label": "Smoothing",
      oninput: (e) => set({ s: Number(e.target.value) }) });
    const smooth = h("output", {}), search = h("input",
      { type: "search", id: "metrics", placeholder: "Filter metrics", "aria-label": "Filter metrics",
        oninput: (e) => set({ m: e.target.value }) });
    const box = (name, label) => h("label", { class: "check" },
      h("input", { type: "checkbox", "data-state": name, onchange: (e) => set({ [name]: e.target.checked ? 1 : 0 }) }), label);
    const reset = h("button", { id: "reset", onclick: () => set({ z: "" }) }, "Reset zoom"),
      marks = h("div", { class: "chips", "aria-label": "Marks" });
    const grid = h("div", { class: "grid" }), legend = h("div", { class: "legend" });
    section("curves", "Curves", "Drag to zoom in all, double click or Escape to see all again.",
      h("div", { class: "tools sticky" }, segments, h("label", { class: "field smooth" }, h("span", {}, "smoothing"), slider, smooth),
        box("ly", "log y"), box("lx", "log x"),
        hasSeeds ? box("g", "group over seeds") : null, search, reset), marks, legend, grid,
      h("p", { class: "note" }, (() => {
        const longest = runs.flatMap((r) => Object.values(r.curves)).reduce((a, b) => (b.n > a.n ? b : a));
        const [most, all] = [numbers(longest.y).length, longest.n];
        if (most === all) return "Every record is a point. ";
        return `Curves are thinned (the longest from ${fmt(all)} to ${fmt(most)} points): each part keeps its extremes and its NaNs. `;
      })(), "Values have seven digits. Red ticks above a curve are NaN or infinite values."));
    const watcher = new IntersectionObserver((entries) => { for (const entry of entries) {
      const chart = charts.find((c) => c.root === entry.target);
      chart.seen = entry.isIntersecting;
      if (chart.seen && chart.dirty) chart.update();
    } }, { rootMargin: "300px" });
    for (const panel of panels) { const chart = new Chart(panel); charts.push(chart); grid.append(chart.root); watcher.observe(chart.root);
      }
    new ResizeObserver(() => refresh()).observe(grid);
    updates.push(() => {
      for (const button of segments.children) button.setAttribute("aria-checked", String(button.dataset.axisName === S.x));
      slider.value = S.s; smooth.textContent = S.s.toFixed(2);
      for (const input of document.querySelectorAll("#curves [data-state]")) input.checked = Boolean(S[input.dataset.state]);
      if (document.activeElement !== search) search.value = S.m;
      reset.disabled = !S.z;
      const counted = markKinds.map((kind) => [kind, marksAt(markedRun()).filter((m) => m.kind === kind).length]).filter(([, n]) => n),
        off = listOf(S.k);
      if (!marks.contains(document.activeElement)) marks.replaceChildren(...counted.map(([kind, n]) => h("button",
        { class: "chip mark", "data-kind": kind, "aria-pressed": String(!off.has(kind)),
        title: `Show or hide: ${kind}`, onclick: (e) => { set({ k: toggled(S.k, kind) });
          e.currentTarget.setAttribute("aria-pressed", String(!listOf(S.k).has(kind))); } },
      h("i", { style: `color:${markHue(kind)}` }, GLYPH[kind] ?? "•"),
        ` ${n} ${n > 1 && /[kpt]$/.test(kind) ? `${kind}s` : kind.replaceAll("_", " ")}`)), many && counted.length
          ? h("span", { class: "note" }, `of ${runs[markedRun()].name}`) : "");
      legend.replaceChildren(...(!many ? [] : S.g && hasSeeds
        ? groups.map((g, n) => h("span", {}, swatch(groups.length <= 8 ? hue(n) : colorOf(g[0])), nameOfGroup(g)))
        : runs.length <= 8 ? runs.map((r, i) => h("button",
          { class: `link ${isShown(i) && isBrushed(i) ? "" : "dim"}`, onmouseenter: () => hover(i), onmouseleave: () => hover(null),
            onclick: () => set({ run: i }) }, swatch(colorOf(i)), r.name))
          : [h("span", {}, `${M}: worst `), h("i", { class: "ramp",
            style: `background:linear-gradient(90deg,${RAMP[theme()].join(",")})` }), h("span", {}, " best")]));
      if (legend.firstChild && many && !S.g && runs.length > 8 && order.length
        && better) legend.title = "The colour of a run is its rank by the metric";
      for (const chart of charts) {
        chart.root.hidden = Boolean(S.m) && !chart.panel.keys.some((k) => k.includes(S.m));
        chart.update();
      }
    });
  }

  // ---------------------------------------------------------------- where the time went
  const runPicker = () => (many ? select("run", runs.map((r, i) => [i, r.name]), S.run, (v) => set({ run: Number(v) })) : null);
  const partHue = (name) => hue(PARTS[name] ?? 7);
  const lastOf = new Map(); // an update that nothing concerns is left out
  const changed = (name, ...values) => { const text = JSON.stringify(values); if (lastOf.get(name) === text) return false;
    lastOf.set(name, text); return true; };
  if (runs.some((r) => r.times)) {
    const box = h("div");
    section("time", "Where the time went", null, box);
    updates.push(() => {
      if (!changed("time", S.run, S.heat, theme(), box.clientWidth)) return;
      const r = runs[S.run], t = r.times;
      if (!t) { box.replaceChildren(h("div", { class: "tools" }, runPicker()),
        h("p", { class: "note" }, "This run has no times.jsonl: nothing measured where its time went.")); return; }
      const P = t.parts.length, R = t.ranks.length, C = t.steps.length, by = numbers(t.seconds);
      const mean = Float64Array.from({ length: C * P }, (_, n) => {
        let sum = 0;
        for (let k = 0; k < R; k++) sum += by[(Math.floor(n / P) * R + k) * P + (n % P)] / R;
        return sum;
      });
      const sums = t.parts.map((_, p) => mean.reduce((a, v, n) => (n % P === p ? a + v : a), 0));
      const g = t.goodput, total = sums.reduce((a, b) => a + b, 0);
      const pieces = [["steps", g.steps_s, hue(0)], ["steps taken again", g.lost_s, hue(1)],
        ["evaluations", g.evaluation_s, partHue("evaluation")],
        ["saves", g.checkpoint_s, partHue("checkpoint")], ["starting", g.start_s, hue(4)], ["restarts", g.restart_s, hue(5)],
        ["waiting in a queue", g.queue_s, hue(7)], ["stopped", g.stopped_s, css("--faint")]].filter(([, v]) => v > 0);
      const W = Math.max(280, box.clientWidth - 26), LEFT = 58, width = W - LEFT - 8, H1 = 150;
      const widths = t.taken.map((n) => Math.max(n, 1)), all = widths.reduce((a, b) => a + b, 0);
      let sofar = 0;
      const lefts = widths.map((w) => { const at = LEFT + (sofar / all) * width; sofar += w; return at; });
      const right = (c) => (c + 1 < C ? lefts[c + 1] : LEFT + width);
      const heights = Array.from({ length: C }, (_, c) => t.parts.reduce((a, _, p) => a + mean[c * P + p], 0) / Math.max(1, t.taken[c]));
      const sortedHeights = [...heights].sort((a, b) => a - b), top = Math.max(...heights) > 4 * sortedHeights[Math.floor(C / 2)]
        ? 2.2 * sortedHeights[Math.floor(C / 2)] : Math.max(...heights) || 1;
      const base = new Float64Array(C);
      const areas = t.parts.map((part, p) => {
        const up = [], down = [];
        for (let c = 0; c < C; c++) {
          const y = (v) => 8 + (1 - Math.min(1, v / top)) * H1, low = base[c];
          base[c] += mean[c * P + p] / Math.max(1, t.taken[c]);
          up.push(`${lefts[c].toFixed(1)} ${y(base[c]).toFixed(1)}L${right(c).toFixed(1)} ${y(base[c]).toFixed(1)}`);
          down.unshift(`${right(c).toFixed(1)} ${y(low).toFixed(1)}L${lefts[c].toFixed(1)} ${y(low).toFixed(1)}`);
        }
        return svg("path", { d: `M${up.join("L")}L${down.join("L")}Z`, fill: partHue(part) });
      });
      const columnAt = (e, drawing) => { const x = (point(e, drawing)[0] * W) / drawing.getBoundingClientRect().width; let c = C - 1;
        while (c > 0 && lefts[c] > x) c--; return c; };
      const range = (c) => `steps ${fmt(t.steps[c] - t.taken[c] + 1)} to ${fmt(t.steps[c])}`;
      const over = svg("svg", { class: "split", viewBox: `0 0 ${W} ${H1 + 34}`, height: H1 + 34, role: "img",
        "aria-label": "Seconds of a step by part, over the run",
        onmousemove: (e) => { const c = columnAt(e, over);
          showTip(e.clientX, e.clientY, h("div", { class: "at" }, range(c)),
            t.parts.map((p, n) => h("div", { class: "row" }, swatch(partHue(p)), h("span", {}, p),
          h("b", {}, p in t.not_split ? "not split" : duration(mean[c * P + n] / Math.max(1, t.taken[c])))))); }, onmouseleave: hideTip },
      ticksOf(0, top, 4).map((v) => [svg("line", { class: "grid", x1: LEFT, x2: W - 8, y1: 8 + (1 - v / top) * H1,
        y2: 8 + (1 - v / top) * H1 }),
        svg("text", { class: "tick", x: LEFT - 6, y: 12 + (1 - v / top) * H1, "text-anchor": "end" }, duration(v))]).flat(), areas,
      [0, 0.25, 0.5, 0.75, 1].map((f) => svg("text", { class: "tick", x: LEFT + f * width, y: H1 + 26, "text-anchor": f === 0 ? "start"
        : f === 1 ? "end" : "middle" },
        fmt(Math.round(t.steps[0] - t.taken[0] + f * (t.steps[C - 1] - t.steps[0] + t.taken[0]))))));
      const compute = ["forward", "backward", "optimizer", "other"], summed = { own: ["data", ...compute], compute }[S.heat] ?? [S.heat];
      const value = (c, k) => summed.reduce((a, p) => a + by[(c * R + k) * P + t.parts.indexOf(p)], 0) / Math.max(1, t.taken[c]);
      const cells = Array.from({ length: C }, (_, c) => Array.from({ length: R }, (_, k) => value(c, k)));
      const flat = cells.flat().sort((a, b) => a - b), high = flat[Math.floor(0.98 * (flat.length - 1))] || flat.at(-1) || 1;
      const rowHeight = Math.max(5, Math.min(22, 260 / R));
      const host = (k) => (t.hosts[t.ranks[k]] ? ` on ${t.hosts[t.ranks[k]]}` : "");
      const heat = svg("svg", { class: "split", viewBox: `0 0 ${W} ${rowHeight * R + 30}`, height: rowHeight * R + 30, role: "img",
        "aria-label": `Seconds of a step in ${S.heat}, by rank and step`,
        onmousemove: (e) => {
          const c = columnAt(e, heat), k = Math.floor((point(e, heat)[1] - 2) / rowHeight);
          if (k < 0 || k >= R) return hideTip();
          const middle = [...cells[c]].sort((a, b) => a - b)[Math.floor(R / 2)];
          showTip(e.clientX, e.clientY, h("div", { class: "at" }, `rank ${t.ranks[k]}${host(k)}, ${range(c)}`),
            h("div", {}, `${S.heat === "own" ? "own time" : S.heat}: ${duration(cells[c][k])} a step`),
              h("div", {}, `${fmt(cells[c][k] / (middle || 1), 3)} x the median of the ranks`));
        }, onmouseleave: hideTip },
      cells.map((column, c) => column.map((v, k) => svg("rect",
        { x: lefts[c], width: right(c) - lefts[c] + 0.4, y: 2 + k * rowHeight, height: rowHeight - (rowHeight > 9 ? 1 : 0),
          fill: mix(RAMP[theme()], v / high) }))),
      t.ranks.map((rank, k) => (rowHeight >= 11 || k % Math.ceil(11 / rowHeight) === 0 ? svg("text",
        { class: "tick", x: LEFT - 6, y: 2 + (k + 0.5) * rowHeight + 4, "text-anchor": "end" }, `rank ${rank}`) : "")),
      svg("text", { class: "tick", x: LEFT, y: rowHeight * R + 22 }, `step ${fmt(t.steps[0] - t.taken[0])}`),
        svg("text", { class: "tick", x: LEFT + width, y: rowHeight * R + 22, "text-anchor": "end" }, fmt(t.steps[C - 1])));
      const reasons = Object.entries(t.not_split).map(([part, why]) => `${part} is not split${why ? `: ${why}` : ""}`);
      const bar = (entries, sum) => [h("div", { class: "life", role: "img",
        "aria-label": entries.map(([p, v]) => `${p} ${percent(v / sum)}`).join(", ") },
        entries.map(([p, v, color]) => h("i", { style: `flex:${v / sum};background:${color}`, title: `${p}: ${duration(v)}` }))),
      h("div", { class: "legend" }, entries.map(([p, v, color]) => h("span", {}, swatch(color), `${p} ${percent(v / sum)}`)))];
      box.replaceChildren(h("div", { class: "tools" }, runPicker(), h("span", { class: "big" }, h("b", { id: "goodput" }, percent(g.share)),
        ` goodput: of ${duration(g.wall_s)} since the first start, the share of steps whose results were kept`)),
      h("div", { class: "panel" }, bar(pieces, g.wall_s)),
      h("div", { class: "panel" }, h("h3", {}, "A step's time, mean of the ranks"), over,
        h("div", { class: "legend" }, t.parts.map((p, n) => [p, sums[n]]).filter(([, v]) => v > 0)
          .map(([p, v]) => h("span", {}, swatch(partHue(p)), `${p} ${percent(v / total)}`)))),
        h("div", { class: "panel" }, h("div", { class: "tools" }, h("h3", {}, "By rank"),
          select("part", [["own", "own time"], ["compute", "compute"], ...t.parts.map((p) => [p, p])], S.heat, (v) => set({ heat: v })),
          h("span", { class: "note" }, "0"), h("i", { class: "ramp",
            style: `background:linear-gradient(90deg,${RAMP[theme()].join(",")})` }),
              h("span", { class: "note" }, `${duration(high)} a step`)), heat,
          r.marks.filter((m) => m.kind.startsWith("slow_rank")).slice(-8).map((m) =>
            h("p", { class: "note slow" }, `step ${fmt(m.step)}: ${m.text}`)),
          h("p", { class: "note" }, `Own time is data and compute; compute is ${compute.join(", ").replace(/, (\w+)$/, " and $1")}.`)),
        reasons.length ? h("p", { class: "note" }, `${reasons.join("; ")}.`) : "");
    });
  } else section("time", "Where the time went", runs.some((r) => r.step)
    ? "Nothing measured it: there is no times.jsonl. Runs of an older version have none." : "It ended before its first record.");

  // ---------------------------------------------------------------- evaluation: confusion, calibration, flipped samples
  if (runs.some((r) => r.evaluation)) {
    const box = h("div");
    section("evaluation", "Predictions", "Of the newest evaluation that saved them.", box);
    const confusion = (ev) => {
      const K = ev.classes, n = numbers(ev.confusion), sums = Array.from({ length: K },
        (_, a) => { let s = 0; for (let b = 0; b < K; b++) s += n[a * K + b]; return s; });
      const size = Math.max(6, Math.min(34, 380 / K)), L = 48, W = L + size * K + 10, ink = RAMP[theme()];
      const drawing = svg("svg", { class: "confusion", viewBox: `0 0 ${W} ${W - L + 44}`, style: `max-width:${W}px`, role: "img",
        "aria-label": `Confusion of ${K} classes`,
        onmousemove: (e) => {
          const f = W / drawing.getBoundingClientRect().width, [x, y] = point(e, drawing),
            [b, a] = [Math.floor((x * f - L) / size), Math.floor((y * f - 4) / size)];
          if (a < 0 || b < 0 || a >= K || b >= K) return hideTip();
          showTip(e.clientX, e.clientY, h("div", { class: "at" }, a === b ? `class ${a}, right` : `${a} taken for ${b}`),
            h("div", {}, `${fmt(n[a * K + b])} of ${fmt(sums[a])} (${percent(n[a * K + b] / (sums[a] || 1))})`));
        }, onmouseleave: hideTip });
      for (let a = 0; a < K; a++) {
        for (let b = 0; b < K; b++) {
          const v = n[a * K + b], share = v / (sums[a] || 1), shade = a === b ? share : Math.sqrt(share);
          drawing.append(svg("rect", { x: L + b * size, y: 4 + a * size, width: size - 1, height: size - 1, rx: 2, fill: v
            ? (a === b ? ink[2] : hue(1)) : css("--grid"), "fill-opacity": v ? 0.12 + 0.88 * shade : 0.5 }));
          if (size >= 24 && v) drawing.append(svg("text", { x: L + (b + 0.5) * size, y: 4 + (a + 0.5) * size + 4, "text-anchor": "middle",
            class: shade > 0.5 ? "cell on" : "cell" }, v >= 1e4 ? `${Math.round(v / 1000)}k` : v));
        }
        if (size >= 12 || a % 5 === 0) drawing.append(svg("text",
          { class: "tick", x: L - 6, y: 4 + (a + 0.5) * size + 4, "text-anchor": "end" }, a),
            svg("text", { class: "tick", x: L + (a + 0.5) * size, y: 4 + K * size + 14, "text-anchor": "middle" }, a));
      }
      drawing.append(svg("text", { class: "name", x: L + (K * size) / 2, y: 4 + K * size + 34, "text-anchor": "middle" }, "predicted"),
        svg("text", { class: "name", transform: `translate(12 ${4 + (K * size) / 2}) rotate(-90)`, "text-anchor": "middle" }, "target"));
      return drawing;
    };
    const calibration = (ev) => {
      const W = 330, H = 300, L = 44, B = 40, x = (v) => L + v * (W - L - 12), y = (v) => 10 + (1 - v) * (H - B - 10),
        most = Math.max(...ev.calibration.map((r) => r[2]));
      return svg("svg", { class: "confusion", viewBox: `0 0 ${W} ${H}`, style: `max-width:${W}px`, role: "img",
        "aria-label": `Calibration, expected error ${fmt(ev.calibration_error, 3)}` },
        [0, 0.25, 0.5, 0.75, 1].map((v) => [svg("line", { class: "grid", x1: x(0), x2: x(1), y1: y(v), y2: y(v) }),
          svg("text", { class: "tick", x: L - 6, y: y(v) + 4, "text-anchor": "end" }, v),
            svg("text", { class: "tick", x: x(v), y: H - B + 16, "text-anchor": "middle" }, v)]).flat(),
        ev.calibration.map(([c, , n]) => svg("rect", { x: x(c) - 7, width: 14, y: y((0.3 * n) / most), height: y(0) - y((0.3 * n) / most),
          fill: css("--faint"), "fill-opacity": 0.45 })),
        svg("line", { class: "front", x1: x(0), y1: y(0), x2: x(1), y2: y(1), "stroke-dasharray": "4 4" }),
        svg("polyline", { points: ev.calibration.map(([c, s]) => `${x(c)},${y(s)}`).join(" "), fill: "none", stroke: hue(0),
          "stroke-width": 2 }),
        ev.calibration.map(([c, s, n]) => svg("circle", { cx: x(c), cy: y(s), r: 4, fill: hue(0) },
          svg("title", {}, `said ${percent(c)}, right ${percent(s)}, ${fmt(n)} samples`))),
        svg("text", { class: "name", x: x(0.5), y: H - 4, "text-anchor": "middle" }, ev.is_of_yes ? "probability of a yes"
          : "probability that the model gives"), svg("text",
            { class: "name", transform: `translate(11 ${y(0.5)}) rotate(-90)`, "text-anchor": "middle" }, ev.is_of_yes ? "share of yes"
              : "share of hits"));
    };
    const table = (head, rows) => h("div", { class: "scroll short", tabindex: "0", role: "region", "aria-label": head.join(", ") },
      h("table", {}, h("thead", {}, h("tr", {}, head.map((t) => h("th", {}, t)))),
        h("tbody", {}, rows.map((row) => h("tr", {}, row.map((v) => h("td", { class: "number" }, v)))))));
    updates.push(() => {
      if (!changed("evaluation", S.run, S.vs, theme())) return;
      const r = runs[S.run], ev = r.evaluation, parts = [h("div", { class: "tools" }, runPicker())];
      if (!ev) { box.replaceChildren(...parts, h("p", { class: "note" },
        "This run saved no predictions of classes; a run with evaluation.save_predictions=true does.")); return; }
      const facts = [`Step ${fmt(ev.step)}`, plural(ev.samples, "sample"), `accuracy ${fmt(ev.accuracy)}`,
        ev.calibration_error === undefined ? "" : `expected calibration error ${fmt(ev.calibration_error, 3)}`];
      parts.push(h("p", { class: "note" }, `${facts.filter(Boolean).join(", ")}.`));
      const views = [];
      if (ev.confusion) views.push(h("div", { class: "panel" }, h("h3", {}, "Confusion"), confusion(ev)));
      if (ev.calibration) views.push(h("div", { class: "panel" }, h("h3", {}, "Calibration"), calibration(ev)));
      const others = runs.map((_, i) => i).filter((i) => i !== S.run && runs[i].evaluation?.answers && ev.answers
        && runs[i].evaluation.answers.target === ev.answers.target);
      if (others.length) {
        const other = others.includes(S.vs) ? S.vs : others[0], b = runs[other].evaluation.answers, a = ev.answers;
        const [target, pa, pb] = [numbers(a.target), numbers(a.prediction), numbers(b.prediction)],
          [qa, qb] = [a, b].map((e) => (e.probability ? numbers(e.probability) : null));
        const lost = [], won = [];
        let both = 0;
        target.forEach((t, n) => { if (pa[n] === t && pb[n] !== t) lost.push(n); else if (pa[n] !== t && pb[n] === t) won.push(n);
          else if (pa[n] === t) both++; });
        // McNemar's test, with continuity correction
        const z = (Math.abs(lost.length - won.length) - 1) / Math.sqrt(lost.length + won.length || 1);
        const answer = (p, q, n) => `${p[n]}${q ? ` (${q[n]} %)` : ""}`;
        views.push(h("div", { class: "panel wide", id: "flips" },
          h("div", { class: "tools" }, h("h3", {}, "Samples that flip"),
            select("against", others.map((i) => [i, runs[i].name]), other, (v) => set({ vs: Number(v) }))),
          h("p", {}, h("b", { "data-flips": `${lost.length} ${won.length}` },
            `${fmt(lost.length)} right here alone, ${fmt(won.length)} right there alone`),
              `; both right ${fmt(both)}, both wrong ${fmt(target.length - both - lost.length - won.length)}. `,
            h("span", { class: "note" }, z > 1.96 ? "The difference is certain (McNemar, 95 %)."
              : "The difference may be chance (McNemar, 95 %).")),
          table(["sample", "target", "here", "there"], [...lost, ...won].sort((m, n) => m - n).slice(0,
            200).map((n) => [fmt(n), fmt(target[n]), answer(pa, qa, n), answer(pb, qb, n)])),
          lost.length + won.length > 200 ? h("p", { class: "note" }, "The first 200. ") : ""));
      }
      box.replaceChildren(...parts, h("div", { class: "views" }, views));
    });
  }

  // ---------------------------------------------------------------- images and texts by step
  if (runs.some((r) => r.shown.length)) {
    const box = h("div", { class: "shown" }), places = {};
    const markdown = (text) => { // a table, which callbacks write
      const rows = text.split("\n").filter((line) => !/^[|\s:-]+$/.test(line)).map((line) => line.split("|").slice(1,
        -1).map((cell) => cell.trim()));
      return h("div", { class: "scroll short", tabindex: "0" },
        h("table", {}, h("thead", {}, h("tr", {}, rows[0].map((c) => h("th", {}, c)))),
        h("tbody", {}, rows.slice(1).map((row) => h("tr", {}, row.map((c) => h("td", {}, c)))))));
    };
    section("samples", "Images and texts", "What callbacks have shown, by step.", box);
    updates.push(() => {
      if (!changed("samples", S.run)) return;
      box.replaceChildren(h("div", { class: "tools" }, runPicker()),
        ...(runs[S.run].shown.length ? runs[S.run].shown.filter((s) => s.shown.length).map((s) => {
        const view = h("div", { class: "view" }), told = h("output", {}), key = `${S.run} ${s.name}`;
        const slider = h("input", { type: "range", min: 0, max: s.shown.length - 1, step: 1, value: places[key] ?? s.shown.length - 1,
          "aria-label": `Step of ${s.name}`, oninput: () => show() });
        slider.value = places[key] ?? s.shown.length - 1;
        const show = () => {
          const one = s.shown[Number(slider.value)];
          places[key] = Number(slider.value);
          told.textContent = `step ${fmt(one.step)}`;
          view.replaceChildren(one.value.startsWith("data:image/png") ? h("img", { src: one.value, alt: `${s.name} at step ${one.step}` })
            : one.value.startsWith("|") ? markdown(one.value) : h("pre", { tabindex: "0" }, one.value));
        };
        show();
        return h("figure", { class: "panel" }, h("figcaption", {}, h("b", {}, s.name), told), s.shown.length > 1 ? slider : "", view,
          s.shown.length < s.of ? h("p", { class: "note" }, `${s.shown.length} of ${s.of} steps`) : "");
      }) : [h("p", { class: "note" }, "This run has shown none.")]));
    });
  }

  // ---------------------------------------------------------------- configuration and environment
  const treeSection = (name, title, note) => {
    const hidden = name === "environment" ? ["command", "overrides"] : []; // shown as commands
    const trees = D[name].map((tree) => Object.fromEntries(leaves(tree).filter(([key]) => !hidden.includes(key)))), keys = [...new Set(trees.flatMap(Object.keys))];
    const text = (i, key) => (key in trees[i] ? (trees[i][key] === null ? "null" : typeof trees[i][key] === "string" ? trees[i][key]
      : JSON.stringify(trees[i][key])) : "absent");
    const differs = new Set(keys.filter((key) => trees.some((_, i) => text(i, key) !== text(0, key))));
    const box = h("div", { class: "panel tree", role: "tree", "aria-label": title }),
      search = h("input", { type: "search", placeholder: "Filter keys", "aria-label": `Filter ${title}`,
        oninput: (e) => set({ f: e.target.value }) });
    const only = h("label", { class: "check" }, h("input",
      { type: "checkbox", "data-only": name, onchange: (e) => set({ d: e.target.checked ? 1 : 0 }) }),
        `only differences (${differs.size})`);
    const picker = h("span");
    section(name, title, note, h("div", { class: "tools" }, picker, many ? only : null, search), box);
    const open = new Set();
    const branch = (prefix, list) => {
      const heads = new Map();
      for (const key of list) {
        const first = key.slice(prefix.length).split(".")[0];
        heads.set(first, [...(heads.get(first) || []), key]);
      }
      return [...heads].map(([head, below]) => {
        const full = prefix + head;
        if (below.length === 1 && below[0] === full) {
          const others = [...new Set(runs.map((_, i) => text(i, full)))];
          return h("div", { class: `leaf ${differs.has(full) ? "differs" : ""}`, role: "treeitem", "data-key": full },
            h("span", { class: "key" }, head), h("span", { class: "value" }, text(S.run, full)),
            differs.has(full) ? h("small", { title: others.join("\n") },
              others.filter((v) => v !== text(S.run, full)).slice(0, 6).join("  ·  ")) : null);
        }
        const marked = below.filter((key) => differs.has(key)).length, path = `${name} ${full}`;
        return h("details", { open: S.f || S.d || marked || open.has(path)
          || (prefix === "" && below.length < 9 && name === "config" && !many && innerWidth > 760), role: "treeitem",
            ontoggle: (e) => (e.target.open ? open.add(path) : open.delete(path)) },
          h("summary", {}, head, marked ? h("small", { class: "differs" }, plural(marked, "difference")) : h("small", {},
            fmt(below.length))), h("div", { role: "group" }, branch(`${full}.`, below.filter((key) => key !== full))));
      });
    };
    updates.push(() => {
      if (!changed(name, S.run, S.f, S.d)) return;
      picker.replaceChildren(runPicker() || "");
      const input = only.querySelector("input");
      input.checked = Boolean(S.d);
      if (document.activeElement !== search) search.value = S.f;
      const kept = keys.filter((key) => (!S.f || `${key} ${text(S.run, key)}`.toLowerCase().includes(S.f.toLowerCase()))
        && (!many || !S.d || differs.has(key)));
      box.replaceChildren(...(kept.length ? branch("", kept)
        : [h("p", { class: "note" }, S.d && many && !differs.size ? "The runs do not differ here." : "No such key.")]));
    });
  };
  treeSection("config", "Configuration", many ? "Values of the chosen run; where runs differ, the others' values beside them." : null);
  treeSection("environment", "Environment", null);

  // ---------------------------------------------------------------- how to get it again
  {
    const box = h("div");
    section("reproduce", "Get it again", null, box);
    updates.push(() => {
      if (!changed("reproduce", S.run)) return;
      const r = runs[S.run], env = D.environment[S.run];
      const quote = (word) => (/[^\w/.=,@:+-]/.test(word) ? `'${word.replaceAll("'", "'\\''")}'` : word);
      box.replaceChildren(h("div", { class: "tools" }, runPicker() || ""),
        h("div", { class: "panel" }, h("p", {}, "From its folder: the same code, configuration and seed, and what differs here."),
          command(`ddp-train reproduce ${quote(r.folder)}`),
        / (-m|--multirun)( |$)/.test(env.command || "") ? [h("p", {}, "This job of the sweep alone, as a new run",
          env.working_directory ? ` in ${env.working_directory}` : "", ":"),
          command(["ddp-train", ...env.overrides.map(quote)].join(" "))] : env.command ? [h("p", {}, "As it was typed", env.working_directory ? ` in ${env.working_directory}` : "", ":"),
          command(env.command.replace(/^\S*\/(?=ddp-train)/, ""))] : "",
        env.commit ? h("p", { class: "note" }, `Commit ${env.commit}`) : ""));
    });
  }

  // ---------------------------------------------------------------- keys, theme, printing, reloading
  addEventListener("keydown", (e) => { if (e.key === "Escape") { hideTip(); if (S.z || S.b) set({ z: "", b: "" }); } });
  addEventListener("hashchange", () => { readState(); setTheme(); refresh(); });
  addEventListener("scroll", hideTip, { passive: true });
  addEventListener("resize", refresh);
  isDark.addEventListener("change", () => { setTheme(); refresh(); });
  addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light";
    for (const chart of charts) { chart.seen = true; chart.update(); } });
  addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; setTheme(); refresh(); });
  updates.unshift(setTheme);
  readState();
  setTheme();
  for (const update of updates) update();
  document.documentElement.dataset.ready = "yes";
  if (D.reload) setTimeout(() => location.reload(), 1000 * D.reload);
})().catch((error) => {
  const text = `This page cannot be shown: ${error.message}. It needs a browser from 2023 or later.`;
  document.getElementById("page").append(Object.assign(document.createElement("p"), { className: "problem", textContent: text }));
  throw error;
});
