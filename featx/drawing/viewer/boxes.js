// Turns folders into boxes: what stands where in an open folder, and the lines between. Only open folders are laid out,
// each on its own, and what has not changed is kept: opening a folder lays out that folder and those around it.

const HEADER = 30;
const PADDING = 16;
const LINE_WIDTH = 10;
const MOST_WIDENING = 140;
const PICTURE = 56; // the height of a thumbnail on a box

class Boxes {
  constructor(model, open, measure) {
    this.model = model;
    this.open = open; // a Set of folders
    this.measure = measure; // width of a text in "label" or "subtitle" type
    this.known = new Map();
    this.ownerOf = new Int32Array(model.size);
  }

  get root() { return this.box(this.model.root); }

  // Forget what depends on whether `folder` is open.
  forget(folder) {
    for (let id = folder; id >= 0; id = this.model.parent(id)) this.known.delete(id);
  }
  forgetAll() { this.known.clear(); }

  box(id) {
    let box = this.known.get(id);
    if (!box) {
      box = this.open.has(id) || id === this.model.root ? this.openBox(id) : this.closedBox(id);
      this.known.set(id, box);
    }
    return box;
  }

  closedBox(id) {
    const { model } = this;
    const isFolder = model.isFolder(id);
    const subtitle = model.subtitleOf(id);
    const label = shorten(model.labelOf(id));
    const width = Math.max(this.measure(label, "label") + (isFolder ? 18 : 0), subtitle ? this.measure(subtitle, "subtitle") : 0);
    const text = subtitle ? 40 : 26;
    const picture = model.pictureOf(id);
    const room = picture ? PICTURE + 10 : 0;
    return { id, label, subtitle, picture, text, w: Math.max(Math.ceil(width) + 26, picture ? PICTURE + 28 : 56), h: text + room };
  }

  openBox(id) {
    const { model } = this;
    const items = model.items(id);
    const inner = items.map((item) => this.box(item));
    const wires = this.wires(id, items);
    const isRoot = id === model.root;
    // Ports stand for the values that come in, then the items, then ports for the values that go out.
    const ins = [...wires.ins];
    const outs = [...wires.outs];
    const count = ins.length + items.length + outs.length;
    const pins = Array.from({ length: count }, (_, vertex) => {
      if (vertex < ins.length) return "top";
      if (vertex >= ins.length + items.length) return "bottom";
      const item = items[vertex - ins.length];
      return !model.isFolder(item) && model.text("kind", item) === "io" && !model.inputs[item].length ? "top" : "";
    });
    const edges = this.edgesOf(wires, ins, outs, items);
    const layers = new Layers(count, edges, pins);
    const itemOf = (vertex) => (vertex >= ins.length && vertex < ins.length + items.length ? inner[vertex - ins.length] : null);
    const widths = Array.from({ length: layers.size }, (_, vertex) => itemOf(vertex)?.w ?? LINE_WIDTH);
    const space = (one, other) => (itemOf(one) && itemOf(other) ? 26 : 14);
    const x = placeColumns(layers, widths, space);
    const y = this.rows(layers, x, itemOf, isRoot, ins.length > 0);
    const side = isRoot ? 0 : PADDING;
    const title = isRoot ? 0 : this.headerWidth(id);
    const content = widths.reduce((most, width, vertex) => Math.max(most, x[vertex] + width / 2), 0);
    // What comes in does so in the middle where that costs little, so that lines into boxes in boxes stay straight.
    const middle = ins.length && Math.abs(content - 2 * x[0]) <= MOST_WIDENING ? x[0] : content / 2;
    const w = Math.max(2 * Math.max(middle, content - middle) + 2 * side, title);
    const shift = w / 2 - middle;
    const box = { id, isOpen: true, title, w, h: y.height, ins: new Map(), outs: new Map() };
    ins.forEach((value, index) => box.ins.set(value, x[index] + shift));
    outs.forEach((value, index) => box.outs.set(value, x[ins.length + items.length + index] + shift));
    box.items = inner.map((item, index) => {
      const vertex = ins.length + index;
      return { box: item, x: x[vertex] + shift - item.w / 2, y: y.top[layers.rank[vertex]] };
    });
    box.lines = edges.map((edge) => this.line(edge, layers, box, ins.length, x, shift, y));
    return box;
  }

  headerWidth(id) { return this.measure(this.headerOf(id), "label") + 44; }
  headerOf(id) {
    const { model } = this;
    return `${shorten(model.labelOf(id))}   ${[model.typeOf(id), model.rowOf(id)].filter(Boolean).join(" · ")}`;
  }

  // What flows between the items of a folder, into it, and out of it.
  wires(id, items) {
    const { model, ownerOf } = this;
    const [start, end] = [model.start[id - model.size], model.end[id - model.size]];
    items.forEach((item, index) => {
      if (model.isFolder(item)) ownerOf.fill(index, model.start[item - model.size], model.end[item - model.size]);
      else ownerOf[item] = index;
    });
    const ins = new Set();
    const outs = new Set();
    const flows = [];
    for (let node = start; node < end; node++) {
      if (model.isHidden(node)) continue;
      for (const input of model.inputs[node]) {
        if (model.isHidden(input)) continue;
        if (input < start) {
          ins.add(input);
          flows.push([-1, ownerOf[node], input]);
        } else if (ownerOf[input] !== ownerOf[node]) {
          flows.push([ownerOf[input], ownerOf[node], input]);
        }
      }
      if (id !== model.root && model.users[node].some((user) => user >= end && !model.isHidden(user))) {
        outs.add(node);
        flows.push([ownerOf[node], -1, node]);
      }
    }
    return { ins, outs, flows };
  }

  // One edge for all that flows between two closed boxes; an open box has a port for each value.
  edgesOf({ flows }, ins, outs, items) {
    const inPort = new Map(ins.map((value, index) => [value, index]));
    const outPort = new Map(outs.map((value, index) => [value, ins.length + items.length + index]));
    const edges = new Map();
    for (const [source, target, value] of flows) {
      const from = source < 0 ? inPort.get(value) : ins.length + source;
      const to = target < 0 ? outPort.get(value) : ins.length + target;
      const isSplit = (item) => item >= 0 && this.open.has(items[item]);
      const key = source >= 0 && isSplit(source) ? value : -1;
      const name = `${from} ${to} ${key} ${target >= 0 && isSplit(target) ? value : -1}`;
      const edge = edges.get(name);
      if (edge) edge.values.add(value);
      else edges.set(name, { from, to, key, values: new Set([value]), source: source < 0 ? -1 : items[source], target: target < 0 ? -1 : items[target] });
    }
    return [...edges.values()].map((edge) => ({ ...edge, values: [...edge.values] }));
  }

  // The top and bottom of each layer. Lines that go far to the side get a larger gap.
  rows(layers, x, itemOf, isRoot, hasPorts) {
    const depth = layers.layers.length;
    const top = new Float64Array(depth);
    const bottom = new Float64Array(depth);
    let y = isRoot ? 0 : hasPorts ? 0 : HEADER + 8;
    for (let rank = 0; rank < depth; rank++) {
      const isPort = hasPorts && rank === 0;
      const height = isPort ? HEADER : layers.layers[rank].reduce((most, vertex) => Math.max(most, itemOf(vertex)?.h ?? 0), 0);
      const far = layers.layers[rank].reduce((most, vertex) =>
        layers.down[vertex].reduce((widest, below) => Math.max(widest, Math.abs(x[vertex] - x[below])), most), 0);
      top[rank] = y;
      bottom[rank] = y + height;
      y += height + (isPort ? 14 : 22) + Math.min(40, far * 0.06);
    }
    const last = depth ? bottom[depth - 1] : HEADER;
    // Ports of what goes out lie on the lower edge.
    const endsInPorts = depth > 0 && layers.layers[depth - 1].every((vertex) => !itemOf(vertex));
    return { top, bottom, height: isRoot || endsInPorts ? last : last + PADDING };
  }

  // The points of a line; between two layers it swings from one to the other, inside a layer it goes straight down.
  line(edge, layers, box, ports, x, shift, y) {
    const rank = (vertex) => layers.rank[vertex];
    const items = box.items;
    const item = (vertex) => items[vertex - ports];
    const value = edge.values[0];
    const from = item(edge.from);
    const to = item(edge.to);
    const startX = from ? from.x + (from.box.isOpen ? from.box.outs.get(value) : from.box.w / 2) : x[edge.from] + shift;
    const startY = from ? from.y + from.box.h : y.top[rank(edge.from)];
    const endX = to ? to.x + (to.box.isOpen ? to.box.ins.get(value) : to.box.w / 2) : x[edge.to] + shift;
    const endY = to ? to.y : y.bottom[rank(edge.to)];
    const line = { values: edge.values, source: edge.source, target: edge.target, stub: Boolean(edge.stub), hasArrow: Boolean(to) && !to.box.isOpen };
    if (edge.stub) {
      line.points = [startX, startY, endX, endY];
      return bounded(line);
    }
    const points = [startX, startY, startX, Math.max(startY, y.bottom[rank(edge.from)])];
    for (const bend of edge.way) points.push(x[bend] + shift, y.top[rank(bend)], x[bend] + shift, y.bottom[rank(bend)]);
    points.push(endX, y.top[rank(edge.to)], endX, Math.max(endY, y.top[rank(edge.to)]));
    line.points = points;
    return bounded(line);
  }
}

function bounded(line) {
  const { points } = line;
  line.left = line.top = Infinity;
  line.right = line.bottom = -Infinity;
  for (let index = 0; index < points.length; index += 2) {
    line.left = Math.min(line.left, points[index]);
    line.right = Math.max(line.right, points[index]);
    line.top = Math.min(line.top, points[index + 1]);
    line.bottom = Math.max(line.bottom, points[index + 1]);
  }
  return line;
}

function shorten(text) { return text.length > 34 ? `${text.slice(0, 16)}…${text.slice(-16)}` : text; }
