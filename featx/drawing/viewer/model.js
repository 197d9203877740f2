// The graph as the page knows it. Nodes have the numbers 0 to size - 1, folders those behind; the root is `size`.
// What a folder holds follows one another: nodes from start[k] up to, and without, end[k].

class Model {
  constructor(data) {
    Object.assign(this, data);
    this.size = data.label.length;
    this.root = this.size;
    this.start = data.folders.map((row) => row[5]);
    this.end = data.folders.map((row) => row[6]);
    this.inputs = data.inputs.map((steps, node) => steps.map((step) => node - step));
    this.users = data.label.map(() => []);
    this.inputs.forEach((inputs, node) => inputs.forEach((input) => this.users[input].push(node)));
    this.children = data.folders.map(() => []);
    this.fillChildren();
    this.showSizes = data.sizes;
    this.sums = new Map();
  }

  // Nodes come in execution order and folders with the outer ones first, so both lists are walked once.
  fillChildren() {
    let next = 1;
    for (let node = 0; node < this.size; node++) {
      for (; next < this.folders.length && this.start[next] === node; next++) {
        this.children[this.folders[next][0]].push(this.size + next);
      }
      this.children[this.folder[node]].push(node);
    }
  }

  isFolder(id) { return id >= this.size; }
  parent(id) {
    const number = this.isFolder(id) ? this.folders[id - this.size][0] : this.folder[id];
    return number < 0 ? -1 : this.size + number;
  }
  // Every item in a folder is a folder or a node that is shown at present.
  items(id) {
    const all = this.children[id - this.size];
    return this.showSizes ? all : all.filter((child) => !this.isHidden(child));
  }
  isHidden(id) { return !this.showSizes && !this.isFolder(id) && (this.flags[id] & 4) !== 0; }
  contains(id, node) {
    return this.isFolder(id) ? this.start[id - this.size] <= node && node < this.end[id - this.size] : id === node;
  }
  first(id) { return this.isFolder(id) ? this.start[id - this.size] : id; }

  text(column, node) { return this.texts[this[column][node]]; }
  labelOf(id) { return this.isFolder(id) ? this.folders[id - this.size][1] || this.title : this.label[id]; }
  nameOf(id) {
    if (this.isFolder(id)) return this.folders[id - this.size][2];
    if (id in this.name) return this.name[id];
    const path = this.folders[this.folder[id]][2];
    return this.flags[id] & 1 ? `${path}.${this.label[id]}` : this.label[id];
  }
  nodeNameOf(node) { return this.nodeName[node] ?? this.nameOf(node).replaceAll(".", "_"); }
  typeOf(id) { return this.isFolder(id) ? this.folders[id - this.size][3] : this.text("operation", id); }
  rowOf(id) { return this.folders[id - this.size][4]; }
  isQualified(id) { return this.isFolder(id) || (this.flags[id] & 2) !== 0; }
  isMarked(node) { return (this.flags[node] & 8) !== 0; }
  // What stands in small type on a box: what it is, and its shape or size.
  subtitleOf(id) {
    if (this.isFolder(id)) {
      const rest = this.shapeOf(id) || `${this.countOf(id)} nodes`;
      return [[this.typeOf(id), this.rowOf(id)].filter(Boolean).join(" · "), rest].filter(Boolean).join("   ");
    }
    const operation = this.text("operation", id);
    const isSaid = this.text("kind", id) === "io" || operation === this.label[id];
    return [isSaid ? "" : operation, this.shapeOf(id)].filter(Boolean).join("   ");
  }
  // Of a folder, the shape of the last value in it, which is what its path means.
  shapeOf(id) {
    if (!this.isFolder(id)) return this.text("shape", id);
    for (let node = this.end[id - this.size] - 1; node >= this.start[id - this.size]; node--) {
      if (this.text("kind", node) !== "constant" && this.text("shape", node)) return this.text("shape", node);
    }
    return "";
  }
  callOf(node) {
    return this.text("call", node).replace(/⟨(\d+)⟩/g, (_, place) => this.nodeNameOf(this.inputs[node][place]));
  }

  // What a request names: a node with a name of the model, or a module.
  canBeAskedFor(id) {
    if (id === this.root) return false;
    return this.isFolder(id) ? Boolean(this.typeOf(id)) : (this.flags[id] & 2) !== 0 && this.text("kind", id) !== "check";
  }

  // A picture of the map that a node has computed, or, of a folder, of the last one in it; null where there is none.
  pictureOf(id) {
    let node = id;
    if (this.isFolder(id)) {
      for (node = this.end[id - this.size] - 1; node >= this.start[id - this.size]; node--) if (node in this.thumbnails) break;
    }
    if (!(node in this.thumbnails) || (this.isFolder(id) && node < this.start[id - this.size])) return null;
    this.pictures ??= new Map();
    if (!this.pictures.has(node)) this.pictures.set(node, pictureFrom(...this.thumbnails[node]));
    return this.pictures.get(node);
  }

  countOf(id) { return this.sumOf("shown", (node) => (this.isHidden(node) ? 0 : 1), id); }
  parametersOf(id) {
    if (!this.isFolder(id)) return this.parameters[id] ?? 0;
    return this.sumOf("parameters", (node) => (this.parameters[node] ?? 0) - (this.shared[node] ?? 0), id);
  }
  costOf(name, id) { return this.sumOf(`cost ${name}`, (node) => this.costs[name][node] ?? 0, id); }

  // Sums over the nodes of a folder, from running totals that are made at the first question.
  sumOf(key, value, id) {
    if (!this.isFolder(id)) return value(id);
    let totals = this.sums.get(key);
    if (!totals) {
      totals = new Float64Array(this.size + 1);
      for (let node = 0; node < this.size; node++) totals[node + 1] = totals[node] + value(node);
      this.sums.set(key, totals);
    }
    return totals[this.end[id - this.size]] - totals[this.start[id - this.size]];
  }

  setSizes(shown) {
    this.showSizes = shown;
    this.sums.delete("shown");
  }

  // Nodes, in order, whose name, operation and shape have all of the words.
  search(query) {
    const words = query.toLowerCase().replaceAll("×", "x").split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    this.haystack ??= this.label.map((_, node) =>
      `${this.nameOf(node)} ${this.nodeNameOf(node)} ${this.text("operation", node)} ${this.text("shape", node).replaceAll("×", "x")}`.toLowerCase());
    const found = [];
    this.haystack.forEach((text, node) => {
      if (!this.isHidden(node) && words.every((word) => text.includes(word))) found.push(node);
    });
    return found;
  }
}

// A canvas with pixels of red, green and blue, a byte each, in base64.
function pictureFrom(width, height, text) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const image = new ImageData(width, height);
  const bytes = atob(text);
  for (let pixel = 0; pixel < width * height; pixel++) {
    for (let colour = 0; colour < 3; colour++) image.data[4 * pixel + colour] = bytes.charCodeAt(3 * pixel + colour);
    image.data[4 * pixel + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
