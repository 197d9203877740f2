// The list at the side: the tree of folders and nodes, or what a search found. Only rows in sight are in the page.

const ROW = 24;

class Outline {
  // `choose(id)`, `toggle(id)` and `tick(id)` are called for clicks.
  constructor(pane, list, model, state, { choose, toggle, tick }) {
    Object.assign(this, { pane, list, model, state, choose, toggle, tick });
    this.rows = [];
    pane.addEventListener("scroll", () => this.render(), { passive: true });
    list.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (!row) return;
      const id = Number(row.dataset.id);
      if (event.target.closest(".tick")) return this.tick(id);
      if (event.target.closest(".twist") && this.model.isFolder(id)) this.toggle(id);
      else this.choose(id);
    });
    list.addEventListener("dblclick", (event) => {
      const id = Number(event.target.closest(".row")?.dataset.id);
      if (this.model.isFolder(id) && !event.target.closest(".twist")) this.toggle(id);
    });
  }

  // Find the rows again, after folders, the search or the sizes changed.
  update() {
    this.rows = this.state.query ? this.state.found.map((id, place, all) => ({ id, level: 0, place, count: all.length })) : this.treeRows();
    this.index = new Map(this.rows.map((row, index) => [row.id, index]));
    this.list.style.height = `${this.rows.length * ROW + 8}px`;
    this.render();
  }

  treeRows() {
    const { model, state } = this;
    const rows = [];
    const pending = [{ id: model.root, level: -1 }];
    while (pending.length) {
      const row = pending.pop();
      if (row.level >= 0) rows.push(row);
      if (!model.isFolder(row.id) || !state.open.has(row.id)) continue;
      const items = model.items(row.id);
      for (let place = items.length - 1; place >= 0; place--) {
        pending.push({ id: items[place], level: row.level + 1, place, count: items.length });
      }
    }
    return rows;
  }

  render() {
    const { pane, list, rows } = this;
    const first = Math.max(0, Math.floor(pane.scrollTop / ROW) - 6);
    const last = Math.min(rows.length, Math.ceil((pane.scrollTop + pane.clientHeight) / ROW) + 6);
    const parts = [];
    for (let index = first; index < last; index++) parts.push(this.element(rows[index], index));
    if (!rows.length) {
      const nothing = document.createElement("div");
      nothing.className = "nothing";
      nothing.textContent = this.state.query ? "Nothing has all of these words." : "The graph is empty.";
      parts.push(nothing);
    }
    list.replaceChildren(...parts);
    const { selected } = this.state;
    if (this.index?.has(selected)) list.setAttribute("aria-activedescendant", `row-${selected}`);
    else list.removeAttribute("aria-activedescendant");
  }

  element({ id, level, place, count }, index) {
    const { model, state } = this;
    const isFolder = model.isFolder(id);
    const row = document.createElement("div");
    row.className = isFolder ? "row folder" : "row";
    row.id = `row-${id}`;
    row.dataset.id = id;
    row.style.top = `${index * ROW + 4}px`;
    row.style.paddingLeft = `${8 + level * 14}px`;
    row.setAttribute("role", "treeitem");
    row.setAttribute("aria-level", level + 1);
    row.setAttribute("aria-posinset", place + 1);
    row.setAttribute("aria-setsize", count);
    row.setAttribute("aria-selected", state.selected === id);
    row.title = model.nameOf(id);
    if (isFolder) row.setAttribute("aria-expanded", state.open.has(id));
    const mark = document.createElement("span");
    mark.className = isFolder ? "twist" : "dot";
    if (isFolder) mark.textContent = state.open.has(id) ? "▼" : "▶";
    else mark.style.background = `var(--${model.text("kind", id)})`;
    if (!isFolder && !state.query) mark.style.margin = "0 3px";
    row.append(mark, span("label", state.query ? model.nameOf(id) : model.labelOf(id)), span("what", this.whatOf(id)));
    if (model.canBeAskedFor(id)) row.append(this.tickBox(id));
    return row;
  }

  tickBox(id) {
    const box = span("tick", this.state.ticked.has(id) ? "☑" : "☐");
    box.setAttribute("role", "checkbox");
    box.setAttribute("aria-checked", this.state.ticked.has(id));
    box.title = "Take as a feature (t)";
    return box;
  }

  whatOf(id) {
    const { model } = this;
    return model.isFolder(id) ? [model.typeOf(id), model.rowOf(id)].filter(Boolean).join(" · ") : model.subtitleOf(id);
  }

  scrollTo(id) {
    const index = this.index?.get(id);
    if (index === undefined) return;
    const [top, { pane }] = [index * ROW, this];
    if (top < pane.scrollTop + ROW) pane.scrollTop = top - ROW * 3;
    else if (top > pane.scrollTop + pane.clientHeight - 2 * ROW) pane.scrollTop = top - pane.clientHeight / 2;
  }

  // The row so many places from the chosen one.
  step(distance) {
    if (!this.rows.length) return null;
    const index = this.index.get(this.state.selected);
    const next = index === undefined ? 0 : Math.min(this.rows.length - 1, Math.max(0, index + distance));
    return this.rows[next].id;
  }
}

function span(name, text) {
  const element = document.createElement("span");
  element.className = name;
  element.textContent = text;
  return element;
}
