// A search box above each long table: it shows the rows that have every word that is typed.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".content table, article table")) {
    const rows = [...table.querySelectorAll("tbody tr")];
    if (rows.length < 15 || table.dataset.searched) continue;
    table.dataset.searched = "yes";
    const box = document.createElement("input");
    const count = document.createElement("span");
    box.type = "search";
    box.placeholder = `search ${rows.length} rows`;
    box.setAttribute("aria-label", "search the rows of the table below");
    count.setAttribute("role", "status");
    const bar = document.createElement("p");
    bar.className = "search-table";
    bar.append(box, count);
    const place = table.closest(".table-wrapper") || table;
    place.before(bar);
    const texts = rows.map((row) => row.textContent.toLowerCase());
    box.addEventListener("input", () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, at) => {
        row.hidden = !words.every((word) => texts[at].includes(word));
        shown += !row.hidden;
      });
      count.textContent = words.length ? ` ${shown} of ${rows.length}` : "";
    });
  }
});
