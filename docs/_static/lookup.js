// docs/lookup.md: a field, and below it what lookup.json says of the typed model or name.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("lookup"), data = window.lookupData;
  if (!place || !data) return;
  const COLUMNS = ["task", "type", "cls", "family", "adapter", "offered", "tried", "points", "proved", "processed", "missing"];
  const TRANSFORMS = ["fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"];
  const OFFERED = { full: "all", parts: "the stream and its parts; some are missing", stream: "the residual stream only", "–": "none" };
  const models = data.models.map((row) => Object.fromEntries(COLUMNS.map((name, i) => [name, row[i]])));
  const families = new Map(data.families.map(([name, base, file, shape]) => [base, { name, file, shape }]));

  // Text as HTML; `code` and links to other pages as in Markdown.
  const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const html = (text) => escaped(text)
    .replace(/``?([^`]+)``?/g, "<code>$1</code>")
    .replace(/\[([^\]]+)\]\(([\w/]+)\.md(#[\w-]+)?\)/g, (_, label, page, anchor) => `<a href="${page}.html${anchor || ""}">${label}</a>`);
  const list = (items) => `<ul>${items.map((item) => `<li>${item}</li>`).join("")}</ul>`;
  const key = (text) => text.toLowerCase().replace(/[^a-z0-9]/g, "");

  // The models that a text may mean, the nearest kind of match alone.
  function matching(text) {
    const wanted = key(text.slice(text.lastIndexOf("/") + 1));
    if (wanted.length < 2) return [];
    const names = (model) => [key(model.type), key(model.cls)];
    const words = (model) => {
      const family = families.get(model.family);
      return family ? [family.name, ...family.name.split(/[,()]/)].map(key).filter((word) => word.length > 1) : [];
    };
    const tests = [
      (model) => names(model).includes(wanted),
      (model) => words(model).includes(wanted),
      (model) => names(model).some((name) => name.includes(wanted)) || words(model).some((word) => word.includes(wanted)),
    ];
    for (const test of tests) {
      const matches = models.filter(test);
      if (matches.length) return matches;
    }
    const starts = (model) => [key(model.type), ...words(model)].filter((name) => name.length > 2 && wanted.startsWith(name));
    const longest = Math.max(0, ...models.flatMap(starts).map((name) => name.length));
    return models.filter((model) => starts(model).some((name) => name.length === longest));
  }

  // The reasons of a sign (refused, in part) for one type: those that are known to be its own, else the possible ones.
  function reasons(type, names, section) {
    const whole = section.filter(([of, , , types]) => of[0] === "the model" && types.includes(type));
    if (whole.length) return whole.map(([, says]) => `the model cannot be wrapped: ${html(says)}`);
    const groups = new Map();
    for (const name of names) {
      const of = section.filter(([properties]) => properties.includes(name));
      const own = of.filter(([, , , types]) => types.includes(type));
      const others = of.filter(([, , count, types]) => count > types.length);
      const said = own.length || others.length === 1 ? (own.length ? own : others).map((reason) => html(reason[1])).join("; ")
        : `one of <details><summary>${others.length} reasons</summary>${list(others.map((reason) => html(reason[1])))}</details>`;
      groups.set(said, [...(groups.get(said) || []), name]);
    }
    return [...groups].map(([said, of]) => `<b>${of.map(escaped).join(", ")}</b>: ${said}`);
  }

  function properties(model, task, [tried, signs]) {
    const of = (sign) => data.properties.map(([name]) => name).filter((_, i) => signs[i] === sign);
    const [refused, part] = [of("r"), of("p")];
    const where = task === model.task ? "" : ` as ${escaped(data.tasks[task].toLowerCase())}`;
    let text = `${of("y").length} hold${where}, ${part.length} in part, ${refused.length} refused; nothing to try: ${of("-").length}; ${escaped(tried)} models tried`;
    if (refused.length) text += `<p>Refused:</p>${list(reasons(model.type, refused, data.refused))}`;
    if (part.length) text += `<p>Not compared everywhere:</p>${list(reasons(model.type, part, data.part))}`;
    return text;
  }

  function peers(type) {
    const of = (rows) => rows.filter((row) => row[row.length - 1].includes(type));
    const shows = (what) => (what ? `, which shows ${html(what)}` : "");
    const only = new Map();
    for (const [peer, name] of of(data.peers["only there"])) only.set(peer, [...(only.get(peer) || []), name]);
    return [
      ...of(data.peers.differs).map(([verdict, peer, theirs, ours, what]) =>
        `<b>${escaped(verdict)}</b>: <code>${escaped(theirs)}</code> of ${escaped(peer)}${shows(what)}; here <code>${escaped(ours)}</code>`),
      ...[...only].map(([peer, names]) => `only in ${escaped(peer)}: ${names.map((name) => `<code>${escaped(name)}</code>`).join(", ")}`),
      ...of(data.peers["not compared"]).map(([peer, why]) => `${escaped(peer)} was not compared: ${escaped(why)}`),
    ];
  }

  function entry(model) {
    const family = families.get(model.family);
    const adapter = { declared: "declared", inferred: "inferred from one run, and verified on the model", "–": "none" }[model.adapter] +
      (family ? ` in <code>adapters/families/${family.file}</code> (${escaped(family.name)}: ${html(family.shape)})` : "");
    const supported = model.adapter === "–" ? "no" : model.offered === "full" && model.proved ? "yes" : "in part";
    const holds = Object.entries(data.holds).filter(([name]) => name.slice(name.indexOf(":") + 1) === model.type)
      .filter(([name]) => name.startsWith(`${model.task}:`) || !models.some((other) => name === `${other.task}:${other.type}`));
    const rows = [["Supported", supported], ["Adapter", adapter]];
    if (supported !== "no") {
      rows.push(["Hook points", `${OFFERED[model.offered]}; ${model.points} in the small model`]);
      rows.push(["Verified", `${model.proved ? "every claim" : "not every claim"}, in ${model.tried} configurations`]);
      rows.push(["<code>process_weights</code>", [...model.processed].map((i) => `<code>${TRANSFORMS[i] || i}</code>`).join(", ") || "changes nothing"]);
    }
    if (model.missing) rows.push([supported === "no" ? "Why not" : "Missing", list(model.missing.split("; ").map(html))]);
    for (const [name, found] of holds) rows.push(["Properties", properties(model, name.slice(0, name.indexOf(":")), found)]);
    if (model.task === "causal") {
      const others = peers(model.type);
      rows.push(["Other libraries", others.length ? list(others) : "no difference found"]);
    }
    const cells = rows.map(([name, text]) => `<tr><th>${name}</th><td>${text}</td></tr>`).join("");
    return `<h2>${escaped(model.type)} <small>${escaped(model.cls)}, ${escaped(data.tasks[model.task].toLowerCase())}</small></h2>
      <div class="table-wrapper"><table class="docutils lookup">${cells}</table></div>`;
  }

  // Rows of names that have every typed word.
  function named(text) {
    const words = text.toLowerCase().split(/[\s()]+/).filter((word) => word.length > 2);
    if (!words.length) return [];
    const has = (where) => words.every((word) => where.toLowerCase().includes(word));
    return [
      ...data.names.filter(([, name]) => has(name)).map(([group, name, theirs, here, why]) =>
        [html(name), [group === "differs" ? `HookedTransformer: ${html(theirs)}` : "", `here: ${html(here) || "–"}`, html(why)]]),
      ...data.replacements.filter(([where, name]) => has(`${where}.${name}`)).map(([where, name, says]) =>
        [`<code>${escaped(where === "package" ? name : `${where}.${name}`)}</code>`, [`here: ${escaped(says)}`]]),
    ];
  }

  const MOST = { models: 3, names: 30 };
  function show(text) {
    const [matches, names] = [matching(text), named(text)];
    let found = "";
    if (matches.length > MOST.models) {
      const types = [...new Set(matches.map((model) => model.type))];
      found = `<p>${matches.length} models: ${types.map((type) => `<a href="#${escaped(type)}">${escaped(type)}</a>`).join(" ")}</p>`;
    } else {
      found = matches.map(entry).join("");
    }
    if (names.length) {
      const rows = names.slice(0, MOST.names).map(([name, lines]) => `<tr><th>${name}</th><td>${lines.filter(Boolean).join("<br>")}</td></tr>`).join("");
      found += `<h2>Names</h2><div class="table-wrapper"><table class="docutils lookup names">${rows}</table></div>`;
      if (names.length > MOST.names) found += `<p>${names.length - MOST.names} more: type another word.</p>`;
    }
    if (!found && text.trim().length > 1) {
      found = "<p>No model type, class, family or name here. <code>python -m bridge verify MODEL</code> tries a model.</p>";
    }
    results.innerHTML = found;
  }

  place.innerHTML = `<p class="search-table"><label>Model or name <input type="search" autocomplete="off" spellcheck="false"
    placeholder="qwen3, LlamaForCausalLM, get_params"></label></p><div role="status" aria-live="polite"></div>`;
  const box = place.querySelector("input"), results = place.querySelector("[role=status]");
  const fromAddress = () => {
    const text = decodeURIComponent(location.hash.slice(1));
    if (!text) return;
    box.value = text;
    show(text);
  };
  box.addEventListener("input", () => show(box.value));
  window.addEventListener("hashchange", fromAddress);
  fromAddress();
});
