(function () {
  const asked = window.matchMedia("(prefers-color-scheme: dark)");
  function isDark(element) {
    for (let at = element; at; at = at.parentElement) {
      const own = at.dataset.theme || at.dataset.vscodeThemeKind || "";
      if (own.includes("dark")) return true;
      if (own.includes("light")) return false;
      if (at.dataset.jpThemeLight) return at.dataset.jpThemeLight === "false";
    }
    return asked.matches;
  }
  async function embed(element, spec, dark) {
    const options = { actions: false, renderer: element.dataset.renderer, tooltip: { theme: dark ? "dark" : "light" } };
    await window.vegaEmbed(element.querySelector("div"), spec, options);
    return element.querySelector("div").scrollWidth;
  }
  async function draw(element) {
    const dark = isDark(element), room = element.clientWidth, state = `${dark} ${room}`;
    if (element.dataset.drawn === state || !room) return;
    element.dataset.drawn = state;
    const spec = JSON.parse(element.querySelector("script").textContent);
    spec.params.find((parameter) => parameter.name === "dark").value = dark;
    let width = await embed(element, spec, dark);
    const svg = element.querySelector("svg");
    if (svg && width > room && spec.usermeta && spec.usermeta.details) {  // a graph is seen whole, to half its size
      svg.style.width = `${Math.max(room, width / 2)}px`;
      svg.style.height = "auto";
    }
    const panels = [].concat((spec.usermeta && spec.usermeta.wrap) || 0);  // one number for each picture
    for (const [i, part] of (spec.vconcat || [spec]).entries()) {
      const facet = panels[i] && part.encoding.facet;
      const own = part.resolve && part.resolve.axis && part.resolve.axis.x === "independent";
      while (facet && width > room && facet.columns > 1) {
        do facet.columns--; while (!own && panels[i] % facet.columns);  // full rows, or names under every panel
        width = await embed(element, spec, dark);
      }
    }
  }
  const all = () => document.querySelectorAll(".bridge-picture").forEach(draw);
  if (!window.bridgePictures) {
    window.bridgePictures = true;
    asked.addEventListener("change", all);
    window.addEventListener("resize", all);
    const attributeFilter = ["data-theme", "data-jp-theme-light", "data-vscode-theme-kind"];
    for (const element of [document.documentElement, document.body])
      new MutationObserver(all).observe(element, { attributes: true, attributeFilter });
  }
  all();
})();
