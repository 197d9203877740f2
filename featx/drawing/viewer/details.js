// The panel that says all that is known of what is chosen, and of the whole where nothing is.

class Details {
  constructor(panel, model, state, { choose, copy, tick }) {
    Object.assign(this, { panel, model, state, choose, copy, tick });
  }

  show(id) {
    const { panel, model } = this;
    panel.replaceChildren();
    panel.scrollTop = 0;
    if (id === null) this.showModel();
    else if (model.isFolder(id)) this.showFolder(id);
    else this.showNode(id);
  }

  showModel() {
    const { model } = this;
    this.title(model.title, model.typeOf(model.root) === model.title ? "the whole model" : model.typeOf(model.root));
    this.numbers(model.root, [["nodes", model.countOf(model.root).toLocaleString()]]);
    this.heading("Colours");
    const legend = this.add("div", "", "legend");
    const used = new Set(model.kind.filter((_, node) => !model.isHidden(node)).map((place) => model.texts[place]));
    for (const [kind, text] of Object.entries(model.kinds)) {
      if (!used.has(kind)) continue;
      const entry = document.createElement("div");
      entry.append(swatch(kind), text);
      legend.append(entry);
    }
    this.heading("Keys");
    const keys = this.add("div", "", "keys");
    const help = [["↑ ↓", "next, previous"], ["→ ←", "open, close or go out"], ["Enter", "open or close"], ["/", "search"],
      ["c", "copy the name"], ["t", "take as a feature"], ["+ − 0", "zoom, fit"], ["Esc", "back to the whole"]];
    for (const [key, text] of help) {
      const cap = document.createElement("kbd");
      cap.textContent = key;
      keys.append(cap, span("dim", text));
    }
    this.add("p", "Click a folder to open it, and its title to close it. Drag to move; Ctrl and the wheel zoom.", "dim").style.marginTop = "12px";
  }

  showFolder(id) {
    const { model } = this;
    this.title(model.labelOf(id), [model.typeOf(id), model.rowOf(id)].filter(Boolean).join(" · "));
    this.picture(id);
    if (model.typeOf(id)) this.copyable("Path of the module", model.nameOf(id), "It means the last value that is computed inside.");
    this.tickable(id);
    this.numbers(id, [["last shape", model.shapeOf(id)], ["nodes", model.countOf(id).toLocaleString()]]);
    const [start, end] = [model.start[id - model.size], model.end[id - model.size]];
    const reads = new Set();
    const readers = new Set();
    for (let node = start; node < end; node++) {
      for (const input of model.inputs[node]) if (input < start) reads.add(input);
      for (const user of model.users[node]) if (user >= end) readers.add(user);
    }
    this.links("Reads", [...reads]);
    this.links("Read by", [...readers]);
  }

  showNode(id) {
    const { model } = this;
    const kind = model.text("kind", id);
    this.title(model.label[id], model.kinds[kind], kind);
    const name = model.nameOf(id);
    this.picture(id);
    if (model.isQualified(id)) this.copyable("Name", name);
    else this.copyable("Name in the graph", model.nodeNameOf(id), "The model gave no name to it, so no feature can be asked for.");
    this.tickable(id);
    this.numbers(id, [["shape", model.text("shape", id)], ["dtype", model.text("dtype", id)]]);
    this.heading("Call");
    this.block(model.callOf(id));
    if (model.text("call", id).startsWith("self.") && kind !== "constant") {
      this.block(`${model.text("operation", id)}(${model.text("settings", id)})`);
    }
    if (model.text("source", id)) {
      this.heading("Source");
      this.block(model.text("source", id));
    }
    this.links("Reads", model.inputs[id]);
    this.links("Read by", model.users[id]);
    if (model.isQualified(id) && model.nodeNameOf(id) !== name) this.copyable("Name in the graph", model.nodeNameOf(id));
  }

  // -- parts --------------------------------------------------------------------------------------------------------

  add(tag, text, name = "") {
    const element = document.createElement(tag);
    element.textContent = text;
    if (name) element.className = name;
    this.panel.append(element);
    return element;
  }

  heading(text) { this.add("h3", text); }
  block(text) { this.add("code", text, "block").style.marginBottom = "4px"; }

  title(text, below, kind = "") {
    this.add("h2", text);
    const line = this.add("p", "", "dim");
    if (kind) line.append(swatch(kind));
    line.append(below);
  }

  copyable(heading, text, note = "") {
    this.heading(heading);
    const row = this.add("div", "", "copyable");
    const code = document.createElement("code");
    code.append(...breakable(text));
    const button = document.createElement("button");
    button.textContent = "Copy";
    button.className = "copy";
    button.addEventListener("click", async () => {
      button.textContent = (await this.copy(text)) ? "Copied" : "Not copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1200);
    });
    row.append(code, button);
    if (note) this.add("p", note, "dim");
  }

  // A box to take the value as a feature.
  tickable(id) {
    if (!this.model.canBeAskedFor(id)) return;
    const label = this.add("label", "", "take");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = this.state.ticked.has(id);
    box.addEventListener("change", () => this.tick(id));
    label.append(box, "take as a feature");
  }

  // The map that it has computed, larger than on the box.
  picture(id) {
    const small = this.model.pictureOf(id);
    if (!small) return;
    const large = this.add("canvas", "", "picture");
    const size = Math.max(1, Math.floor(240 / Math.max(small.width, small.height)));
    [large.width, large.height] = [small.width * size, small.height * size];
    const context = large.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, large.width, large.height);
    large.setAttribute("role", "img");
    large.setAttribute("aria-label", "The first three principal components of the map");
  }

  numbers(id, rows) {
    const { model } = this;
    const list = this.add("dl", "");
    const add = (name, text, exact = "") => {
      const term = document.createElement("dt");
      term.textContent = name;
      const value = document.createElement("dd");
      value.textContent = text;
      if (exact) value.title = exact;
      list.append(term, value);
    };
    for (const [name, text] of rows) if (text) add(name, text);
    const parameters = model.parametersOf(id);
    if (parameters) add("parameters", short(parameters) + (!model.isFolder(id) && model.shared[id] ? " (shared)" : ""), parameters.toLocaleString());
    for (const name of Object.keys(model.costs)) {
      if (model.isFolder(id) && !model.summed.includes(name)) continue;
      const sum = model.costOf(name, id);
      if (sum) add(name.replaceAll("_", " "), short(sum), sum.toLocaleString());
    }
    if (!list.children.length) list.remove();
  }

  links(heading, nodes) {
    const { model } = this;
    const shown = nodes.filter((node) => !model.isHidden(node));
    if (!shown.length) return;
    this.heading(`${heading} ${shown.length > 1 ? shown.length : ""}`);
    const list = this.add("div", "", "links");
    for (const node of shown.slice(0, 40)) {
      const button = document.createElement("button");
      const name = span("", "");
      name.append(...breakable(model.nameOf(node)));
      button.append(swatch(model.text("kind", node)), name);
      button.addEventListener("click", () => this.choose(node));
      list.append(button);
    }
    if (shown.length > 40) this.add("p", `and ${shown.length - 40} more`, "dim");
  }
}

// A dotted name may be broken behind its dots.
function breakable(text) {
  return text.split(/(?<=[._])/).flatMap((part) => [part, document.createElement("wbr")]);
}

function swatch(kind) {
  const mark = document.createElement("span");
  mark.className = "swatch";
  mark.style.background = `var(--${kind})`;
  return mark;
}

// 25557032 as 25.6 M.
function short(number) {
  const units = ["", " k", " M", " G", " T", " P"];
  let power = 0;
  let value = number;
  for (; Math.abs(value) >= 999.95 && power < units.length - 1; power++) value /= 1000;
  return `${power ? value.toPrecision(3) : Number(value.toPrecision(6))}${units[power]}`;
}
