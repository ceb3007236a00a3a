"use strict";
(() => {
  const { tables } = JSON.parse(document.getElementById("board").textContent);
  const VERDICTS = ["held", "reversed", "open"];
  const MARKS = { held: "✓", reversed: "✗", open: "?" };
  const NONE = "none yet";
  const CHANGED = "recipe has changed";
  const used = new Set(tables.flatMap((table) => table.boards.map((board) => board.scale)));
  const SCALES = ["paper", "small", ...[...used].filter((scale) => scale !== "paper" && scale !== "small")];

  // ------------------------------------------------------------------------------------------------- elements

  // Texts only ever become text nodes and attributes, so that nothing in the data is markup.
  const maker = (create) => (tag, attributes = {}, ...children) => {
    const node = create(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (typeof value === "function") node.addEventListener(name, value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
    return node;
  };
  const h = maker((tag) => document.createElement(tag));
  const s = maker((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  const byId = (id) => document.getElementById(id);
  const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

  // -------------------------------------------------------------------------------------------------- numbers

  const decimals = (value) => Math.min(6, (String(value).split(".")[1] ?? "").length);
  const unit = (measure) => (measure.unit ? ` ${measure.unit}` : "");
  const published = (value, measure) =>
    typeof value === "number" ? value.toFixed(Math.max(measure.digits, decimals(value))) : value;
  const signed = (value, digits) => {
    const size = Math.abs(value).toFixed(digits);
    return Number(size) === 0 ? size : `${value < 0 ? "−" : "+"}${size}`;
  };
  const judged = (difference, measure) => {
    if (!measure.better || Number(difference.toFixed(measure.digits)) === 0) return "same";
    return difference > 0 === (measure.better === "higher") ? "better" : "worse";
  };
  const failed = (value, measure) => {
    if (value === null) return true;
    if (measure.failed === null) return false;
    return measure.better === "higher" ? value <= measure.failed : value >= measure.failed;
  };
  const duration = (seconds) => {
    if (seconds < 100) return `${Math.round(seconds)} s`;
    if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
    return `${(seconds / 3600).toFixed(1)} h`;
  };
  const explained = (measure) => {
    const better = measure.better ? `, ${measure.better} is better` : "";
    return `${measure.title}${measure.unit ? ` in ${measure.unit}` : ""}${better}`;
  };

  // --------------------------------------------------------------------------------------------------- curves

  const points = (run) =>
    run.curve
      .split(" ")
      .map((part) => part.split(":").map(Number))
      .filter(([step, value]) => Number.isFinite(step) && Number.isFinite(value));

  // The authors' curve at the steps at which ours were measured, between its own points on a straight line.
  const atSteps = (line, steps) =>
    steps.flatMap((step) => {
      const after = line.findIndex(([at]) => at >= step);
      if (after < 0) return [];
      const [right, high] = line[after];
      if (right === step) return [[step, high]];
      if (after === 0) return [];
      const [left, low] = line[after - 1];
      return [[step, low + ((high - low) * (step - left)) / (right - left)]];
    });

  const curvesOf = (table, name, cell) => {
    const runs = cell.runs.map((run) => ({ run, line: points(run) })).filter(({ line }) => line.length);
    const steps = [...new Set(runs.flatMap(({ line }) => line.map(([step]) => step)))].sort((a, b) => a - b);
    return { runs, reference: atSteps(table.reference[name] ?? [], steps) };
  };

  const scaleOf = (values, wanted) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const logarithmic = wanted === "lower" && low > 0 && high / low > 8;
    const form = logarithmic ? Math.log10 : (value) => value;
    const room = (form(high) - form(low)) * 0.06 || Math.abs(form(high)) * 0.06 || 1;
    return { logarithmic, form, low: form(low) - room, high: form(high) + room };
  };

  const path = (line, x, y) => line.map(([at, value], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const cross = (x, y, size) =>
    `M${(x - size).toFixed(1)} ${(y - size).toFixed(1)}l${2 * size} ${2 * size}m0 ${-2 * size}l${-2 * size} ${2 * size}`;

  const lines = (found, x, y, size) => {
    const drawn = [];
    if (found.reference.length > 1) drawn.push(s("path", { class: "released", d: path(found.reference, x, y) }));
    else if (found.reference.length) {
      const [at, value] = found.reference[0];
      drawn.push(s("circle", { class: "released", cx: x(at), cy: y(value), r: size }));
    }
    found.runs.forEach(({ run, line }, index) => {
      const end = line[line.length - 1];
      drawn.push(s("path", { class: `seed seed-${index % 10}`, d: path(line, x, y) }));
      if (run.value === null) drawn.push(s("path", { class: "lost", d: cross(x(end[0]), y(end[1]), size) }));
      else if (line.length === 1) {
        drawn.push(s("circle", { class: `seed-dot seed-${index % 10}`, cx: x(end[0]), cy: y(end[1]), r: size * 0.8 }));
      }
    });
    return drawn;
  };

  const extent = (found) => {
    const all = [...found.runs.flatMap(({ line }) => line), ...found.reference];
    return { values: all.map(([, value]) => value), last: Math.max(...all.map(([step]) => step)) };
  };

  const sparkline = (table, name, cell) => {
    const found = curvesOf(table, name, cell);
    if (!found.runs.length) return null;
    const [width, height, edge] = [120, 30, 3];
    const { values, last } = extent(found);
    const scale = scaleOf(values, table.measures[name].better);
    const x = (step) => edge + ((width - 2 * edge) * step) / last;
    const y = (value) => height - edge - ((height - 2 * edge) * (scale.form(value) - scale.low)) / (scale.high - scale.low);
    return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, lines(found, x, y, 2.5));
  };

  const ticks = ({ logarithmic, low, high }) => {
    if (!logarithmic) {
      const rough = (high - low) / 4;
      const base = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((factor) => factor * base).find((one) => one >= rough);
      const count = Math.floor(high / step) - Math.ceil(low / step) + 1;
      return Array.from({ length: count }, (_, index) => (Math.ceil(low / step) + index) * step);
    }
    const found = [];
    for (let power = Math.floor(low); power <= high; power += 1) {
      for (const factor of high - low < 1.6 ? [1, 2, 5] : [1, 3]) found.push(factor * 10 ** power);
    }
    return found.filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
  };
  const short = (value) => Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 6 });

  const chart = (table, name, cell, theirs) => {
    const found = curvesOf(table, name, cell);
    if (!found.runs.length) return null;
    const measure = table.measures[name];
    const width = Math.max(300, Math.min(680, innerWidth - 32)); // of its own size, so that its text is, too
    const [height, left, right, top, bottom] = [Math.min(300, 0.7 * width), 52, 14, 12, 44];
    const { values, last } = extent(found);
    const number = typeof theirs === "number" ? theirs : null;
    const scale = scaleOf(number === null ? values : [...values, number], measure.better);
    const x = (step) => left + ((width - left - right) * step) / last;
    const y = (value) =>
      height - bottom - ((height - top - bottom) * (scale.form(value) - scale.low)) / (scale.high - scale.low);
    const text = (content, attributes) => s("text", attributes, content);
    const grid = ticks(scale).flatMap((value) => [
      s("line", { class: "rule", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      text(short(value), { x: left - 8, y: y(value) + 4, "text-anchor": "end" }),
    ]);
    const below = ticks({ logarithmic: false, low: 0, high: last }).map((step) =>
      text(short(step), { x: x(step), y: height - bottom + 18, "text-anchor": "middle" }),
    );
    const level = number === null ? [] : [s("line", { class: "level", x1: left, x2: width - right, y1: y(number), y2: y(number) })];
    const title = `${measure.title}${measure.unit ? `, ${measure.unit}` : ""}${scale.logarithmic ? ", logarithmic" : ""}`;
    const labels = [
      text("step", { x: width - right, y: height - 8, "text-anchor": "end", class: "axis" }),
      text(title, { x: left, y: height - 8, class: "axis" }),
    ];
    const key = (kind, label) =>
      h("li", {}, s("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" }, s("path", { class: kind, d: "M1 4H23" })), label);
    const keys = found.runs.map(({ run }, index) =>
      key(`seed seed-${index % 10}`, `seed ${run.seed}${run.value === null ? " (diverged)" : ""}`),
    );
    if (found.reference.length) keys.push(key("released", "released by the authors, at the same steps"));
    if (number !== null) keys.push(key("level", `published, ${published(number, measure)}`));
    return h(
      "div",
      { class: "chart" },
      s(
        "svg",
        { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${measure.title} by step` },
        grid, below, labels, level, lines(found, x, y, 4),
      ),
      h("ul", { class: "keys" }, keys),
    );
  };

  // --------------------------------------------------------------------------------------------- small pieces

  const chip = (verdict, scale, old = false) =>
    h(
      "span",
      { class: `chip ${verdict === NONE ? "none" : verdict}${old ? " old" : ""}` },
      MARKS[verdict] ? h("i", { "aria-hidden": "true" }, `${MARKS[verdict]} `) : null,
      verdict, scale ? h("small", {}, ` · ${scale} scale`) : null,
    );
  const mark = () => h("span", { class: "mark" }, CHANGED);

  const copied = (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    return Promise.reject(new Error("no clipboard"));
  };
  const byHand = (text, button) => {
    const area = h("textarea", { class: "away", readonly: true, "aria-hidden": "true" }, text);
    button.after(area); // beside the button: what is outside an open panel cannot be selected
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    button.focus();
    return done;
  };
  const copyable = (text, label, kind = "code") => {
    // The words of a command stay whole: a line that ends in one hyphen of two is misread.
    const words = text.split(" ").flatMap((word, index) => [index ? " " : null, h("span", {}, word)]);
    const code = h(kind, { tabindex: kind === "pre" ? "0" : null }, kind === "pre" ? text : words);
    const button = h("button", { type: "button", class: "copy", "aria-label": `Copy ${label}` }, "Copy");
    button.addEventListener("click", async () => {
      const done = await copied(text).then(() => true, () => byHand(text, button));
      button.textContent = done ? "Copied" : "Not copied";
      button.setAttribute("aria-label", `${done ? "Copied" : "Not copied"}: ${label}`);
      setTimeout(() => {
        button.textContent = "Copy";
        button.setAttribute("aria-label", `Copy ${label}`);
      }, 2000);
    });
    return h("div", { class: `copyable ${kind}` }, code, button);
  };

  const scrolling = (label, content) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);
  const page = (text) => (/^\d+([-–]\d+)?$/.test(text) ? `page ${text}` : text);
  const chapterTitle = (chapter) => {
    if (/^\d+$/.test(chapter)) return `Chapter ${chapter}`;
    return /^[A-Z]$/.test(chapter) ? `Appendix ${chapter}` : chapter;
  };

  // ------------------------------------------------------------------------------------------------- verdicts

  const isOld = (board, ordering) =>
    ordering.pairs.some(([better, worse]) => board.cells[better]?.stale || board.cells[worse]?.stale);

  // Verdicts on today's recipes, of every preset.
  const verdictsOf = (board) => board.orderings.filter((one) => !isOld(board, one)).map((one) => one.verdict);

  // One entry for each ordering of the work: a verdict, that its recipe has changed, or that there is none yet.
  const settled = (table, scale) =>
    table.claims.map((says) => {
      for (const board of table.boards.filter((one) => one.scale === scale)) {
        const found = board.orderings.find((one) => one.says === says);
        if (found) return isOld(board, found) ? CHANGED : found.verdict;
      }
      return NONE;
    });

  // ----------------------------------------------------------------------------------------------------- head

  const tile = (scale) => {
    const measured = tables.reduce((sum, table) => {
      const boards = table.boards.filter((board) => board.scale === scale);
      return sum + new Set(boards.flatMap((board) => Object.keys(board.cells))).size;
    }, 0);
    const trainable = tables.reduce(
      (sum, table) => sum + Object.keys(table.published).filter((name) => !(name in table.untrained)).length, 0,
    );
    const orderings = tables.flatMap((table) => settled(table, scale));
    const kinds = [...VERDICTS, CHANGED, NONE].map((kind) => [kind, orderings.filter((one) => one === kind).length]);
    const present = kinds.filter(([kind, count]) => count || VERDICTS.includes(kind));
    const classed = (kind) => ({ [CHANGED]: "changed", [NONE]: "none" })[kind] ?? kind;
    const part = (kind, count) => {
      const node = h("span", { class: `part ${classed(kind)}` });
      node.style.flexGrow = count;
      node.hidden = !count; // else its least width would show what is not there
      return node;
    };
    return h(
      "section",
      { class: "tile", "data-scale": scale, "aria-label": `Counts at ${scale} scale` },
      h("h2", {}, `${scale[0].toUpperCase()}${scale.slice(1)} scale`),
      h("p", { class: "big" }, h("b", { class: "measured" }, measured.toLocaleString("en")), ` of ${plural(trainable, "cell")} measured`),
      h("div", { class: "bar", "aria-hidden": "true" }, part("measured", measured), part("none", Math.max(0, trainable - measured))),
      h("p", { class: "what" }, plural(orderings.length, "published ordering")),
      h("div", { class: "bar", "aria-hidden": "true" }, kinds.filter(([, count]) => count).map(([kind, count]) => part(kind, count))),
      h(
        "ul",
        { class: "tally" },
        present.map(([kind, count]) =>
          h("li", { class: classed(kind) }, h("i", { "aria-hidden": "true" }), h("b", {}, String(count)), ` ${kind}`),
        ),
      ),
    );
  };

  const drawCounts = () => {
    const runs = new Map();
    for (const table of tables) {
      for (const board of table.boards) {
        for (const cell of Object.values(board.cells)) {
          for (const run of cell.runs) runs.set(`${run.recipe_hash} ${run.seed} ${run.scale}`, run.seconds);
        }
      }
    }
    const started = tables.filter((table) => table.boards.length).length;
    const seconds = [...runs.values()].reduce((sum, one) => sum + one, 0);
    const cells = tables.reduce((sum, table) => sum + Object.keys(table.published).length, 0);
    byId("counts").append(
      h(
        "section",
        { class: "tile whole", "aria-label": "Counts of all" },
        h("h2", {}, "Published"),
        h("p", { class: "big" }, h("b", {}, String(tables.length)), ` ${tables.length === 1 ? "table" : "tables"}`),
        h("p", { class: "what" }, plural(cells, "cell")),
        h("h2", {}, "Measured"),
        h("p", { class: "big" }, h("b", {}, String(started)), ` of ${plural(tables.length, "table")}`),
        h("p", { class: "what" }, `${plural(runs.size, "training")}${runs.size ? `, ${duration(seconds)}` : ""}`),
      ),
      ...SCALES.map(tile),
    );
    const term = (word, meaning) => [h("dt", {}, word), h("dd", {}, meaning)];
    byId("legend").append(
      h(
        "details",
        { class: "legend" },
        h("summary", {}, "How to read this"),
        h(
          "dl",
          {},
          term("A cell", "The mean of our seeds with half the width of its 95 % interval; below it the published number, the difference, the place in the column, and the curves of the seeds, with the authors' own released one dashed. Choose it for everything else."),
          term("Paper and small scale", "As long as published, and a share of that. They are never mixed: every verdict names its scale."),
          term("Held, reversed, open", "Whether an ordering that the work states shows in our numbers: by a paired 95 % interval over the seeds. Open means that the seeds do not decide it. The counts above take the first preset of a table that has a result."),
          term("N/C", "Not converged: it diverged, or ended where chance does."),
          term("Quoted", "A number that the work took over from others; nothing is trained for it."),
          term(CHANGED[0].toUpperCase() + CHANGED.slice(1), "The number was measured with a recipe that is another one today; its verdicts are not counted."),
        ),
      ),
    );
  };

  // ----------------------------------------------------------------------------------------------------- grid

  const titleOf = (table, name) => {
    const [row, column] = name.split("/");
    const titles = [
      [table.rows, row],
      [table.columns, column],
    ].map(([entries, key]) => (entries.length > 1 ? (entries.find((one) => one.name === key)?.title ?? key) : null));
    return titles.filter(Boolean).join(", ") || table.title;
  };

  const ours = (cell) => {
    const [, mean, interval, lost] = /^(.*?)( ± [^ ]+)?( \(.*\))?$/s.exec(cell.text);
    return h(
      "span",
      { class: "ours" },
      h("b", { class: mean === "N/C" ? "lost" : null }, mean),
      interval ? h("span", { class: "interval" }, interval) : null,
      lost ? h("span", { class: "share" }, lost) : null,
    );
  };

  const differenceOf = (cell, measure) => {
    if (cell.difference === null) return null;
    const kind = judged(cell.difference, measure);
    return h(
      "span",
      { class: `difference ${kind}` },
      `${signed(cell.difference, measure.digits)}${unit(measure)}`,
      kind === "same" ? null : h("span", { class: "word" }, ` ${kind}`),
    );
  };

  const rankOf = (cell) => {
    if (cell.rank === null || cell.published_rank === null) return null;
    const same = cell.rank === cell.published_rank;
    return h(
      "span",
      { class: `rank${same ? "" : " moved"}` },
      same ? `rank ${cell.rank}, as published` : `rank ${cell.rank}, published ${cell.published_rank}`,
    );
  };

  const isQuoted = (table, name) => {
    const [row, column] = name.split("/");
    return [...table.rows.filter((one) => one.name === row), ...table.columns.filter((one) => one.name === column)].some((one) => one.quoted);
  };

  const gridCell = (table, board, name) => {
    if (!(name in table.published)) return h("td", { class: "nothing" });
    const measure = table.measures[name];
    const theirs = published(table.published[name], measure);
    const cell = board?.cells[name];
    if (!cell) {
      const quoted = isQuoted(table, name);
      return h(
        "td",
        { class: quoted ? "quoted" : "unmeasured", "data-cell": name },
        h(
          "div",
          { class: "cell" },
          h("span", { class: "ours" }),
          h("span", { class: "published" }, board && theirs !== null && !quoted ? "published " : null, theirs ?? "–", quoted ? h("small", {}, " quoted") : null),
        ),
      );
    }
    return h(
      "td",
      { class: cell.stale ? "measured stale" : "measured", "data-cell": name },
      h(
        "button",
        { type: "button", class: "cell", "aria-haspopup": "dialog", click: (event) => openCell(table, board, name, event.currentTarget) },
        ours(cell),
        h("span", { class: "published" }, theirs === null ? "not published" : ["published ", h("span", {}, theirs)]),
        differenceOf(cell, measure) ?? h("span", { class: "difference" }),
        rankOf(cell) ?? h("span", { class: "rank" }),
        sparkline(table, name, cell) ?? h("span", { class: "spark" }),
        cell.stale ? mark() : null,
      ),
    );
  };

  // Where what is measured is said: above the grid if it is the same everywhere, else at the columns or the rows.
  const measuresOf = (table) => {
    const among = (fits) => {
      const found = new Set(Object.entries(table.measures).filter(([name]) => fits(name)).map(([, one]) => explained(one)));
      return found.size === 1 ? [...found][0] : null;
    };
    const columns = table.columns.map((one) => among((name) => name.split("/")[1] === one.name));
    const rows = table.rows.map((one) => among((name) => name.split("/")[0] === one.name));
    const all = among(() => true);
    return { all, columns: all || columns.includes(null) ? [] : columns, rows: all || !columns.includes(null) ? [] : rows };
  };

  const drawGrid = (table, board) => {
    if (!Object.keys(table.published).length) return null;
    const words = measuresOf(table);
    const head = (entry, index) => h("th", { scope: "col" }, entry.title, words.columns[index] ? h("small", {}, words.columns[index]) : null);
    const line = (row, index) =>
      h(
        "tr",
        { class: row.quoted ? "quoted" : null },
        h("th", { scope: "row" }, row.title, words.rows[index] ? h("small", {}, words.rows[index]) : null),
        table.columns.map((column) => gridCell(table, board, `${row.name}/${column.name}`)),
      );
    const kind = table.columns.length === 1 ? "one" : table.columns.length < 4 ? "few" : "many";
    return h(
      "div",
      { class: "gridded" },
      h("p", { class: "measure" }, [board ? null : "Published numbers", words.all, board?.title].filter(Boolean).join(" · ")),
      scrolling(
        `Numbers of ${table.title}`,
        h(
          "table",
          { class: `cells ${kind}` },
          h("thead", {}, h("tr", {}, h("td", { class: "corner" }), table.columns.map(head))),
          h("tbody", {}, table.rows.map(line)),
        ),
      ),
    );
  };

  const untrained = (table) => {
    const reasons = new Map();
    for (const [name, why] of Object.entries(table.untrained)) {
      if (!isQuoted(table, name)) reasons.set(why, [...(reasons.get(why) ?? []), titleOf(table, name)]);
    }
    if (!reasons.size) return null;
    return h(
      "details",
      { class: "plain" },
      h("summary", {}, "Not trained here"),
      h("dl", {}, [...reasons].map(([why, names]) => [h("dt", {}, why), h("dd", {}, names.join("; "))])),
    );
  };

  // ------------------------------------------------------------------------------------------------ orderings

  const drawPair = (table, board, [better, worse, verdict], alone) => {
    const side = (name) => [titleOf(table, name), " ", h("b", {}, board.cells[name]?.text ?? "–")];
    const old = board.cells[better]?.stale || board.cells[worse]?.stale;
    return h(
      "li",
      {},
      h("span", { class: "sides" }, side(better), h("span", { class: "ahead" }, " published ahead of "), side(worse)),
      alone ? null : [chip(verdict, board.scale, old), old ? mark() : null],
    );
  };

  const drawOrderings = (table, board) => {
    if (!table.claims.length) return null;
    const entry = (says) => {
      if (!board) return h("li", { "data-verdict": NONE }, says);
      const found = board.orderings.find((one) => one.says === says);
      if (!found) return h("li", { "data-verdict": NONE }, h("div", { class: "claim" }, chip(NONE, board.scale), h("p", {}, says)));
      const old = isOld(board, found);
      const pairs = h("ul", { class: "pairs" }, [
        ...found.pairs.map((pair) => drawPair(table, board, pair, found.pairs.length === 1)),
        ...(found.unmeasured ? [h("li", {}, `${found.unmeasured} more not measured`)] : []),
      ]);
      const few = found.pairs.length < 4;
      const counted = VERDICTS.map((kind) => [kind, found.pairs.filter((pair) => pair[2] === kind).length]).filter(([, count]) => count);
      const rest = found.unmeasured ? `, ${found.unmeasured} not measured` : "";
      const summary = `${found.pairs.length} pairs: ${counted.map(([kind, count]) => `${count} ${kind}`).join(", ")}${rest}`;
      return h(
        "li",
        { "data-verdict": found.verdict },
        h("div", { class: "claim" }, chip(found.verdict, board.scale, old), h("p", {}, says, old ? [" ", mark()] : null)),
        few ? pairs : h("details", { class: "plain" }, h("summary", {}, summary), pairs),
      );
    };
    return h("div", { class: board ? "orderings" : "orderings plainly" }, h("h4", {}, "What the work says"), h("ul", {}, table.claims.map(entry)), board?.undated ? h("p", { class: "note" }, board.undated) : null);
  };

  // ---------------------------------------------------------------------------------------------------- cards

  const entries = [];

  const drawFacts = (table) => {
    const { source, needs } = table;
    const minutes = needs.minutes ? `${duration(needs.minutes * 60)} on one H200: all cells, one seed, paper scale` : null;
    const fact = (word, content) => (content ? h("div", {}, h("dt", {}, word), h("dd", {}, content)) : null);
    return [
      h(
        "dl",
        { class: "facts-line" },
        fact("Source", [source.work, source.place, page(source.page)].filter(Boolean).join(", ")),
        fact("Also in", source.also.join("; ")),
        fact("Also called", table.also.join(", ")),
        fact("Data", needs.data.join(", ")),
        fact("Takes", minutes),
      ),
      table.note ? h("p", { class: "note" }, table.note) : null,
      table.surrogate ? h("p", { class: "box surrogate" }, h("b", {}, "Stand-in: "), table.surrogate) : null,
      needs.missing ? h("p", { class: "box missing" }, h("b", {}, "Missing: "), needs.missing) : null,
    ];
  };

  const drawTabs = (entry) => {
    const { table } = entry;
    const many = Object.keys(table.presets).length > 1;
    const id = (index) => `${entry.card.id}-board-${index}`;
    const panel = h("div", { class: "panel", role: "tabpanel", tabindex: "-1", id: `${entry.card.id}-panel` });
    const tabs = table.boards.map((board, index) =>
      h(
        "button",
        { type: "button", role: "tab", id: id(index), "aria-controls": panel.id, click: () => entry.select(index) },
        h("b", {}, `${board.scale} scale`), many ? h("small", {}, `constants: ${board.preset}`) : null,
      ),
    );
    entry.select = (index) => {
      entry.chosen = index;
      const board = table.boards[index];
      tabs.forEach((tab, at) => {
        tab.setAttribute("aria-selected", String(at === index));
        tab.tabIndex = at === index ? 0 : -1;
      });
      panel.setAttribute("aria-labelledby", id(index));
      panel.replaceChildren(
        ...[drawGrid(table, board), untrained(table), drawOrderings(table, board)].filter(Boolean),
      );
    };
    const list = h("div", { class: "tabs", role: "tablist", "aria-label": `Results of ${table.title}` }, tabs);
    list.addEventListener("keydown", (event) => {
      const last = tabs.length - 1;
      const to = { ArrowRight: entry.chosen + 1, ArrowLeft: entry.chosen - 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      entry.select((to + tabs.length) % tabs.length);
      tabs[entry.chosen].focus();
    });
    return [list, panel];
  };

  const drawBody = (entry) => {
    if (entry.drawn) return;
    entry.drawn = true;
    const { table } = entry;
    const trainable = Object.values(table.runnable).some(Boolean);
    const scale = table.boards[0]?.scale ?? "small";
    const content = table.boards.length ? drawTabs(entry) : [drawGrid(table, null), untrained(table), drawOrderings(table, null)];
    const commands = [
      trainable ? h("div", {}, h("h4", {}, "Train all of it"), copyable(`hypersphere reproduce ${table.id} --scale ${scale}`, `the command of ${table.title}`)) : null,
      table.pictures.length
        ? h("div", {}, h("h4", {}, "Draw it"), table.pictures.map((line) => copyable(line, "the command of the picture")))
        : null,
    ];
    entry.body.append(...[...drawFacts(table), ...content, ...commands].filter(Boolean));
    if (table.boards.length) entry.select(entry.chosen);
  };

  const drawState = (table) => {
    if (!table.boards.length) {
      const cells = Object.keys(table.published).length;
      const words = [cells ? plural(cells, "cell") : null, table.claims.length ? plural(table.claims.length, "ordering") : null];
      if (!Object.values(table.runnable).some(Boolean)) words.push("cannot be trained here");
      return h("span", { class: "state empty" }, words.filter(Boolean).join(" · "));
    }
    const scales = SCALES.filter((scale) => table.boards.some((board) => board.scale === scale));
    return h(
      "span",
      { class: "state" },
      scales.map((scale) => {
        const found = settled(table, scale);
        const counted = [...VERDICTS, CHANGED].map((kind) => [kind, found.filter((one) => one === kind).length]);
        const shown = counted.filter(([, count]) => count);
        return h(
          "span",
          { class: "at" },
          h("span", { class: "scale" }, `${scale} scale`),
          shown.map(([kind, count]) => h("span", { class: `chip ${kind === CHANGED ? "none old" : kind}` }, `${count} ${kind}`)),
          shown.length ? null : h("span", { class: "chip none" }, "no verdict"),
        );
      }),
    );
  };

  const drawCards = () => {
    const chapters = [...new Set(tables.map((table) => table.chapter))];
    for (const [number, chapter] of chapters.entries()) {
      const section = h("section", { class: "chapter", "aria-labelledby": `chapter-${number}` }, h("h2", { id: `chapter-${number}` }, chapterTitle(chapter)));
      for (const table of tables.filter((one) => one.chapter === chapter)) {
        const body = h("div", { class: "body" });
        const card = h(
          "details",
          { class: table.boards.length ? "card" : "card bare", id: `table-${table.id}`, "data-table": table.id },
          h(
            "summary",
            {},
            h("span", { class: "place" }, table.source.work === "thesis" ? table.source.place : `${table.source.work}, ${table.source.place}`),
            h("h3", {}, table.title),
            drawState(table),
          ),
          body,
        );
        const words = [table.title, table.id, ...table.also, table.source.place, ...table.source.also].join(" ").toLowerCase();
        const entry = { table, card, body, section, words, chosen: 0, drawn: false };
        card.addEventListener("toggle", () => card.open && drawBody(entry));
        entries.push(entry);
        section.append(card);
        if (table.boards.length) {
          drawBody(entry);
          card.open = true;
        }
      }
      byId("tables").append(section);
    }
    byId("tables").append(h("p", { id: "nothing", class: "lead", hidden: true }, "No table fits. ", h("button", { type: "button", click: () => go({}) }, "Show all")));
  };

  // -------------------------------------------------------------------------------------------------- filters

  const state = { chapter: "", verdict: "", scale: "", q: "" };
  const form = byId("filters");

  const drawFilters = () => {
    const choice = (name, legend, values, label = (value) => value) =>
      h(
        "fieldset",
        {},
        h("legend", {}, legend),
        ["", ...values].map((value) =>
          h("label", {}, h("input", { type: "radio", name, value, checked: value === "" }), h("span", {}, value ? label(value) : "all")),
        ),
      );
    form.append(
      choice("chapter", "Chapter", [...new Set(tables.map((table) => table.chapter))]),
      choice("verdict", "Verdict", [...VERDICTS, NONE]),
      choice("scale", "Scale", SCALES),
      h("label", { class: "search" }, h("span", {}, "Title"), h("input", { type: "search", name: "q", placeholder: "Search titles", autocomplete: "off" })),
      h("output", { id: "shown", "aria-live": "polite" }),
    );
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => {
      const data = new FormData(form);
      for (const name of Object.keys(state)) state[name] = String(data.get(name) ?? "");
      const hash = new URLSearchParams(Object.entries(state).filter(([, value]) => value)).toString();
      history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
      apply();
    });
  };

  const fits = ({ table, words }) => {
    if (state.chapter && table.chapter !== state.chapter) return false;
    if (!state.q.toLowerCase().split(/\s+/).every((word) => words.includes(word))) return false;
    const boards = table.boards.filter((board) => !state.scale || board.scale === state.scale);
    const verdicts = boards.flatMap(verdictsOf);
    if (state.verdict === NONE) return !verdicts.length;
    if (state.verdict) return verdicts.includes(state.verdict);
    return !state.scale || boards.length > 0;
  };

  const wantedBoard = (table) =>
    table.boards.findIndex(
      (board) =>
        (!state.scale || board.scale === state.scale) &&
        (!VERDICTS.includes(state.verdict) || verdictsOf(board).includes(state.verdict)),
    );

  const apply = () => {
    let count = 0;
    for (const entry of entries) {
      const shown = fits(entry);
      entry.card.hidden = !shown;
      count += shown;
      if (shown && entry.select && (state.scale || VERDICTS.includes(state.verdict))) {
        const wanted = wantedBoard(entry.table);
        if (wanted >= 0 && wanted !== entry.chosen) entry.select(wanted);
      }
    }
    for (const section of document.querySelectorAll(".chapter")) {
      section.hidden = !section.querySelector(".card:not([hidden])");
    }
    byId("nothing").hidden = count > 0;
    byId("shown").textContent = `${count} of ${plural(entries.length, "table")}`;
  };

  // What the address says: the filters, or one table.
  const read = () => {
    const found = new URLSearchParams(location.hash.slice(1));
    for (const name of Object.keys(state)) state[name] = found.get(name) ?? "";
    for (const input of form.querySelectorAll("input[type=radio]")) input.checked = input.value === state[input.name];
    for (const name of ["chapter", "verdict", "scale"]) {
      if (!form.querySelector(`input[name=${name}]:checked`)) {
        state[name] = "";
        form.querySelector(`input[name=${name}]`).checked = true;
      }
    }
    form.elements.q.value = state.q;
    apply();
    const entry = entries.find(({ table }) => table.id === found.get("table"));
    if (entry) {
      drawBody(entry);
      entry.card.open = true;
      entry.card.scrollIntoView();
    }
  };
  const go = (wanted) => {
    history.replaceState(null, "", `#${new URLSearchParams(wanted)}`);
    read();
  };

  // ---------------------------------------------------------------------------------------------------- panel

  const dialog = byId("cell");
  let opener = null;
  dialog.addEventListener("close", () => opener?.focus());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());

  const drawRuns = (runs, measure) => {
    const heads = ["Seed", "Value", "Status", "Steps", "Time", "Commit", "Recipe", "Data", "Device", "Date"];
    const value = (run) => {
      if (run.value === null) return "N/C";
      return `${run.value.toFixed(measure.digits)}${failed(run.value, measure) ? " (N/C)" : ""}`;
    };
    return scrolling(
      "Trainings of the cell",
      h(
        "table",
        { class: "runs" },
        h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
        h(
          "tbody",
          {},
          runs.map((run) =>
            h(
              "tr",
              { class: run.stale ? "stale" : null },
              h("th", { scope: "row" }, String(run.seed)),
              h("td", {}, value(run)),
              h("td", {}, run.status),
              h("td", {}, run.steps.toLocaleString("en")),
              h("td", {}, duration(run.seconds)),
              h("td", {}, h("code", {}, run.commit)),
              h("td", {}, h("code", {}, run.recipe_hash), run.stale ? [" ", mark()] : null),
              h("td", {}, h("code", {}, run.data)),
              h("td", {}, run.device),
              h("td", {}, run.date),
            ),
          ),
        ),
      ),
    );
  };

  const openCell = (table, board, name, from) => {
    const [cell, measure, theirs] = [board.cells[name], table.measures[name], table.published[name]];
    const number = (word, content) => (content ? h("div", {}, h("dt", {}, word), h("dd", {}, content)) : null);
    const part = (title, ...content) => h("section", {}, h("h3", {}, title), ...content);
    opener = from;
    dialog.replaceChildren(
      h(
        "div",
        { class: "sheet" },
        h(
          "header",
          {},
          h("div", {}, h("p", { class: "place" }, `${table.source.work}, ${table.source.place} · ${table.title}`), h("h2", { id: "cell-title" }, titleOf(table, name))),
          h("button", { type: "button", class: "close", "aria-label": "Close", click: () => dialog.close() }, "✕"),
        ),
        h("p", { class: "under" }, h("span", { class: "chip scale" }, `${board.scale} scale`), ` ${explained(measure)}${board.title ? `; ${board.title}` : ""}`),
        cell.stale ? h("p", { class: "box missing" }, h("b", {}, `The ${CHANGED}: `), "these numbers are of an earlier one.") : null,
        h(
          "dl",
          { class: "numbers" },
          number("Ours", ours(cell)),
          number("Published", theirs === null ? "–" : published(theirs, measure)),
          number("Difference", differenceOf(cell, measure)),
          number("Place", rankOf(cell)),
          number("Seeds", `${cell.seeds}${cell.failed ? `, ${cell.failed} not converged` : ""}`),
        ),
        chart(table, name, cell, theirs),
        part("Command", copyable(cell.command, "the command")),
        cell.deviations.length ? part("Not as published", h("ul", { class: "deviations" }, cell.deviations.map((text) => h("li", {}, text)))) : null,
        part("Trainings", drawRuns(cell.runs, measure)),
        cell.recipe ? h("details", { class: "plain recipe" }, h("summary", {}, "Recipe"), copyable(cell.recipe, "the recipe", "pre")) : null,
      ),
    );
    dialog.showModal();
    dialog.scrollTop = 0;
    dialog.querySelector(".close").focus();
  };

  drawCounts();
  drawFilters();
  drawCards();
  read();
  addEventListener("hashchange", read);
  document.documentElement.setAttribute("data-ready", "");
})();
