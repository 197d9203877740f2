// Puts the page together: what is open, chosen and searched for, and what clicks and keys do.

const element = (id) => document.getElementById(id);

class Page {
  constructor(model) {
    this.model = model;
    this.state = {
      open: new Set(model.open.map((number) => model.size + number)), selected: null, hovered: null, query: "", found: [],
      ticked: new Set(),
    };
    this.initial = new Set(this.state.open);
    const calls = {
      choose: (id) => this.choose(id), toggle: (id) => this.toggle(id), copy: (text) => copyText(text), tick: (id) => this.tick(id),
    };
    this.diagram = new Diagram(element("canvas"), model, this.state);
    this.outline = new Outline(element("outline"), element("rows"), model, this.state, calls);
    this.details = new Details(element("details"), model, this.state, calls);
    this.listen();
    element("sizes").checked = model.showSizes;
    element("sizes-label").hidden = !model.flags.some((flags) => flags & 4);
    this.summarize();
    this.details.show(null);
    this.diagram.resize();
    this.diagram.fit();
    const marked = model.flags.findIndex((_, node) => model.isMarked(node));
    if (marked >= 0) this.diagram.reveal(marked);
    this.outline.update();
  }

  summarize() {
    const parameters = this.model.parametersOf(this.model.root);
    const count = this.model.countOf(this.model.root).toLocaleString();
    const hidden = this.model.size - this.model.countOf(this.model.root);
    const parts = [`${count} nodes`];
    if (hidden) parts[0] += ` (and ${hidden.toLocaleString()} hidden)`;
    if (parameters) parts.push(`${short(parameters)} parameters`);
    element("summary").textContent = parts.join(" · ");
    element("canvas").setAttribute("aria-label", `Diagram of ${this.model.title}, ${count} nodes; the list beside it holds the same`);
  }

  // -- what can be done ---------------------------------------------------------------------------------------------

  choose(id, { reveal = true } = {}) {
    this.state.selected = id;
    if (id !== null && reveal) this.openAround(id);
    this.details.show(id);
    if (id !== null && reveal) this.diagram.reveal(id);
    this.diagram.redraw();
    this.outline.render();
    if (id !== null) this.outline.scrollTo(id);
  }

  openAround(id) {
    const closed = [];
    for (let folder = this.model.parent(id); folder >= 0; folder = this.model.parent(folder)) {
      if (!this.state.open.has(folder)) closed.push(folder);
    }
    if (!closed.length) return;
    this.diagram.keepInPlace(closed.at(-1), () => closed.forEach((folder) => this.setOpen(folder, true)));
    this.outline.update();
  }

  setOpen(folder, isOpen) {
    if (isOpen) this.state.open.add(folder);
    else this.state.open.delete(folder);
    this.diagram.boxes.forget(folder);
  }

  toggle(folder) {
    this.diagram.keepInPlace(folder, () => this.setOpen(folder, !this.state.open.has(folder)));
    this.outline.update();
  }

  setAll(open) {
    this.state.open.clear();
    open.forEach((folder) => this.state.open.add(folder));
    this.diagram.boxes.forgetAll();
    this.diagram.fit();
    this.outline.update();
  }
  unfoldAll() { this.setAll(this.model.folders.map((_, number) => this.model.size + number)); }
  foldAll() { this.setAll([this.model.root]); }

  search(query) {
    this.state.query = query.trim();
    this.state.found = this.model.search(query);
    element("count").textContent = this.state.query ? this.state.found.length.toLocaleString() : "";
    element("outline").scrollTop = 0;
    this.outline.update();
    this.diagram.redraw();
  }

  setSizes(shown) {
    this.model.setSizes(shown);
    if (this.state.selected !== null && this.model.isHidden(this.state.selected)) this.state.selected = null;
    this.diagram.boxes.forgetAll();
    this.diagram.redraw();
    this.summarize();
    this.details.show(this.state.selected);
    if (this.state.query) this.search(this.state.query);
    else this.outline.update();
  }

  // Take a value as a feature, or no more; the call that extracts all of them stands below the drawing.
  tick(id) {
    const { ticked } = this.state;
    if (!this.model.canBeAskedFor(id)) return;
    if (!ticked.delete(id)) ticked.add(id);
    this.showTicked();
  }

  clearTicked() {
    this.state.ticked.clear();
    this.showTicked();
  }

  // In the order in which the model computes them.
  request() {
    const { model } = this;
    const last = (id) => (model.isFolder(id) ? model.end[id - model.size] - 1 : id);
    const names = [...this.state.ticked].sort((one, other) => last(one) - last(other)).map((id) => model.nameOf(id));
    return `featx.create_feature_extractor(model, [${names.map((name) => JSON.stringify(name)).join(", ")}])`;
  }

  showTicked() {
    const count = this.state.ticked.size;
    element("ticked").hidden = !count;
    element("ticked-call").textContent = count ? this.request() : "";
    this.diagram.redraw();
    this.outline.render();
    this.details.show(this.state.selected);
  }

  async copyTicked() {
    const button = element("ticked-copy");
    button.textContent = (await copyText(this.request())) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1200);
  }

  async copyChosen() {
    const { selected } = this.state;
    if (selected === null) return;
    element("details").querySelector(".copy")?.click();
  }

  // -- events -------------------------------------------------------------------------------------------------------

  listen() {
    element("fold-all").addEventListener("click", () => this.foldAll());
    element("unfold-all").addEventListener("click", () => this.unfoldAll());
    element("sizes").addEventListener("change", (event) => this.setSizes(event.target.checked));
    element("ticked-copy").addEventListener("click", () => this.copyTicked());
    element("ticked-clear").addEventListener("click", () => this.clearTicked());
    element("zoom-in").addEventListener("click", () => this.diagram.zoom(1.25));
    element("zoom-out").addEventListener("click", () => this.diagram.zoom(0.8));
    element("zoom-fit").addEventListener("click", () => this.diagram.fitAll());
    element("toggle-outline").addEventListener("click", (event) => {
      const isClosed = element("outline").classList.toggle("closed");
      event.currentTarget.setAttribute("aria-pressed", !isClosed);
      this.outline.render();
    });
    element("query").addEventListener("input", (event) => this.search(event.target.value));
    element("query").addEventListener("keydown", (event) => this.onSearchKey(event));
    document.addEventListener("keydown", (event) => this.onKey(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.diagram.readColours();
      this.diagram.redraw();
    });
    new ResizeObserver(() => {
      this.diagram.resize();
      this.outline.render();
    }).observe(element("stage"));
    this.listenToPointer(element("canvas"));
  }

  listenToPointer(canvas) {
    let press = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 16 : 1;
      if (event.ctrlKey || event.metaKey) this.diagram.zoom(Math.exp(-event.deltaY * lines * 0.004), event.offsetX, event.offsetY);
      else if (event.shiftKey && !event.deltaX) this.diagram.pan(-event.deltaY * lines, 0);
      else this.diagram.pan(-event.deltaX * lines, -event.deltaY * lines);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      press = { x: event.offsetX, y: event.offsetY, isDrag: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const { offsetX: x, offsetY: y } = event;
      if (press && (press.isDrag || Math.hypot(x - press.x, y - press.y) > 4)) {
        this.diagram.pan(x - press.x, y - press.y);
        press = { x, y, isDrag: true };
        canvas.style.cursor = "grabbing";
        return;
      }
      if (!press) this.hover(this.diagram.at(x, y));
    });
    canvas.addEventListener("pointerup", (event) => {
      if (press && !press.isDrag) this.click(this.diagram.at(event.offsetX, event.offsetY));
      press = null;
      canvas.style.cursor = "default";
    });
    canvas.addEventListener("pointerleave", () => this.hover(null));
  }

  hover(target) {
    // Inside an open folder but on none of its boxes, nothing is meant.
    const id = target && this.state.open.has(target.id) && !target.isTitle ? null : target?.id ?? null;
    element("canvas").style.cursor = id === null ? "default" : "pointer";
    if (id === this.state.hovered) return;
    this.state.hovered = id;
    this.diagram.redraw();
  }

  click(target) {
    if (!target) return this.choose(null);
    const isOpen = this.state.open.has(target.id);
    if (isOpen && !target.isTitle) return this.choose(null);
    this.choose(target.id, { reveal: false });
    if (this.model.isFolder(target.id)) this.toggle(target.id);
    this.outline.scrollTo(target.id);
  }

  onSearchKey(event) {
    const distance = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (distance || event.key === "Enter") {
      event.preventDefault();
      const next = this.outline.step(distance ?? (event.shiftKey ? -1 : 1));
      if (next !== null) this.choose(next);
    } else if (event.key === "Escape") {
      event.stopPropagation();
      event.target.value = "";
      this.search("");
      event.target.blur();
      if (this.state.selected !== null) this.choose(this.state.selected);
    }
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input[type=search]")) return;
    const { selected } = this.state;
    const isFolder = selected !== null && this.model.isFolder(selected);
    const onButton = event.target.matches("button, input");
    const move = (distance) => {
      const next = this.outline.step(distance);
      if (next !== null) this.choose(next);
    };
    const page = Math.max(1, Math.floor(element("outline").clientHeight / ROW) - 2);
    const actions = {
      ArrowDown: () => move(1),
      ArrowUp: () => move(-1),
      PageDown: () => move(page),
      PageUp: () => move(-page),
      Home: () => move(-Infinity),
      End: () => move(Infinity),
      ArrowRight: () => (isFolder && !this.state.open.has(selected) ? this.toggle(selected) : move(1)),
      ArrowLeft: () => this.goOut(),
      Enter: () => { if (isFolder) this.toggle(selected); },
      " ": () => { if (isFolder) this.toggle(selected); },
      "/": () => element("query").select(),
      c: () => this.copyChosen(),
      t: () => { if (selected !== null) this.tick(selected); },
      "+": () => this.diagram.zoom(1.25),
      "=": () => this.diagram.zoom(1.25),
      "-": () => this.diagram.zoom(0.8),
      0: () => this.diagram.fitAll(),
      Escape: () => this.choose(null),
    };
    const action = actions[event.key];
    if (!action || (onButton && (event.key === "Enter" || event.key === " "))) return;
    event.preventDefault();
    action();
  }

  goOut() {
    const { selected } = this.state;
    if (selected === null) return;
    if (this.model.isFolder(selected) && this.state.open.has(selected)) return this.toggle(selected);
    const parent = this.model.parent(selected);
    if (parent !== this.model.root) this.choose(parent);
  }
}

// Without permission for the clipboard (an old browser, a frame) the old way still works.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.style.position = "fixed";
    area.style.opacity = "0";
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}

// For those who steer the page from outside.
window.page = new Page(new Model(JSON.parse(element("data").textContent)));
