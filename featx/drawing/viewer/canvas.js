// The window on the drawing: where it is, how large, and what is under the pointer.

// What is smaller than the first is made as large as the second before somebody is to read it.
const SMALLEST = 0.62;
const LEGIBLE = 0.85;

class Diagram extends Painter {
  constructor(canvas, model, state) {
    super(canvas, model, state);
    this.isPending = false;
  }

  resize() {
    const { clientWidth, clientHeight } = this.canvas;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(clientWidth * ratio);
    this.canvas.height = Math.round(clientHeight * ratio);
    this.width = clientWidth;
    this.height = clientHeight;
    this.redraw();
  }

  redraw() {
    if (this.isPending) return;
    this.isPending = true;
    requestAnimationFrame(() => {
      this.isPending = false;
      this.paint();
    });
  }

  // -- the window ---------------------------------------------------------------------------------------------------

  fit() {
    const { w, h } = this.boxes.root;
    const margin = 24;
    this.scale = Math.min(1, (this.width - 2 * margin) / w, (this.height - 2 * margin) / h);
    // A drawing that would be too small to read starts at its top, at a legible size.
    if (this.scale < SMALLEST) this.scale = Math.min(LEGIBLE, Math.max(this.scale, (this.width - 2 * margin) / w));
    this.x = (this.width - w * this.scale) / 2;
    this.y = Math.max(margin, (this.height - h * this.scale) / 2);
    this.redraw();
  }

  // All of it, however small.
  fitAll() {
    const { w, h } = this.boxes.root;
    this.scale = Math.min(1, (this.width - 24) / w, (this.height - 24) / h);
    this.x = (this.width - w * this.scale) / 2;
    this.y = (this.height - h * this.scale) / 2;
    this.redraw();
  }

  zoom(factor, x = this.width / 2, y = this.height / 2) {
    const { w, h } = this.boxes.root;
    const least = Math.min(0.2, this.width / w / 2, this.height / h / 2);
    const scale = Math.min(3, Math.max(least, this.scale * factor));
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
    this.redraw();
  }

  pan(dx, dy) {
    const { w, h } = this.boxes.root;
    const keep = 60;
    this.x = Math.min(this.width - keep, Math.max(keep - w * this.scale, this.x + dx));
    this.y = Math.min(this.height - keep, Math.max(keep - h * this.scale, this.y + dy));
    this.redraw();
  }

  // Where an item stands on the whole drawing; null where a folder around it is closed.
  find(id) {
    const path = [];
    for (let item = id; item !== this.model.root && item >= 0; item = this.model.parent(item)) path.unshift(item);
    let [x, y, box] = [0, 0, this.boxes.root];
    for (const step of path) {
      const item = box.items?.find((candidate) => candidate.box.id === step);
      if (!item) return null;
      [x, y, box] = [x + item.x, y + item.y, item.box];
    }
    return { x, y, box, w: box.w, h: box.h };
  }

  // The same in pixels of the canvas.
  place(id) {
    const found = this.find(id);
    return found && {
      x: found.x * this.scale + this.x, y: found.y * this.scale + this.y, w: found.w * this.scale, h: found.h * this.scale,
    };
  }

  reveal(id) {
    const found = this.find(id);
    if (!found) return;
    if (this.scale < SMALLEST) this.scale = LEGIBLE;
    const { x, y, w, h } = this.place(id);
    const isSeen = x >= 8 && y >= 8 && x + w <= this.width - 8 && y + Math.min(h, HEADER * this.scale) <= this.height - 8;
    if (!isSeen) {
      this.x += this.width / 2 - (x + w / 2);
      this.y += this.height * 0.42 - (y + Math.min(h, this.height * 0.5) / 2);
    }
    this.redraw();
  }

  // Change what is open and keep `id` where it stands in the window.
  keepInPlace(id, change) {
    const before = this.place(id);
    change();
    const after = this.place(id);
    if (before && after) {
      this.x += before.x + before.w / 2 - (after.x + after.w / 2);
      this.y += before.y - after.y;
    }
    this.redraw();
  }

  // -- what is under the pointer ------------------------------------------------------------------------------------

  // The innermost item at a point of the canvas, and whether the point is on the title of an open folder.
  at(x, y) {
    let [px, py] = [(x - this.x) / this.scale, (y - this.y) / this.scale];
    let box = this.boxes.root;
    let found = null;
    for (;;) {
      const item = box.items?.find(({ box: inner, x: left, y: top }) =>
        px >= left && px <= left + inner.w && py >= top && py <= top + inner.h);
      if (!item) return found;
      [px, py, box] = [px - item.x, py - item.y, item.box];
      found = { id: box.id, isTitle: Boolean(box.isOpen) && py <= HEADER };
    }
  }
}
