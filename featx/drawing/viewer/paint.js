// Paints boxes and lines on a canvas: what is outside the window or too small to see costs nothing.

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif';
const FONTS = { label: `600 12px ${FONT}`, subtitle: `11px ${FONT}` };
// Below these scales there is no small type, no type at all, and only plain shapes.
const SMALL_TYPE = 0.5;
const TYPE = 0.36;

class Painter {
  constructor(canvas, model, state) {
    this.canvas = canvas;
    this.model = model;
    this.state = state; // open, selected, hovered, found
    this.context = canvas.getContext("2d");
    this.widths = { label: new Map(), subtitle: new Map() };
    this.boxes = new Boxes(model, state.open, (text, type) => this.measure(text, type));
    this.scale = 1;
    this.x = 0;
    this.y = 0;
    this.readColours();
  }

  measure(text, type) {
    const known = this.widths[type];
    let width = known.get(text);
    if (width === undefined) {
      this.context.font = FONTS[type];
      width = this.context.measureText(text).width;
      known.set(text, width);
    }
    return width;
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colours = new Proxy({}, {
      get: (known, name) => (known[name] ??= style.getPropertyValue(`--${name}`).trim()),
    });
  }

  paint() {
    const { context } = this;
    const ratio = this.canvas.width / this.width || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.translate(this.x, this.y);
    context.scale(this.scale, this.scale);
    context.textBaseline = "middle";
    this.bright = [];
    this.titles = [];
    this.paintInside(this.boxes.root, 0, 0);
    for (const [line, x, y] of this.bright) this.paintLines([line], x, y, this.colours.accent, 2);
    for (const [box, x, y] of this.titles) this.paintTitle(box, x, y);
  }

  isVisible(left, top, right, bottom) {
    const { scale } = this;
    return right * scale + this.x >= 0 && left * scale + this.x <= this.width
      && bottom * scale + this.y >= 0 && top * scale + this.y <= this.height;
  }

  paintInside(box, x, y) {
    const seen = box.lines.filter((line) => this.isVisible(x + line.left, y + line.top, x + line.right, y + line.bottom));
    const bright = [];
    const plain = [];
    for (const line of seen) (this.isBright(line) ? bright : plain).push(line);
    if (Math.max(box.w, box.h) * this.scale > 24) this.paintLines(plain, x, y, this.colours.edge, 1.2);
    for (const line of bright) this.bright.push([line, x, y]);
    for (const item of box.items) {
      const [left, top, inner] = [x + item.x, y + item.y, item.box];
      if (!this.isVisible(left - 4, top - 4, left + inner.w + 8, top + inner.h + 8)) continue;
      if (inner.isOpen) this.paintOpen(inner, left, top);
      else this.paintClosed(inner, left, top);
    }
  }

  isBright(line) {
    const { selected, hovered } = this.state;
    return (selected !== null && this.touches(line, selected)) || (hovered !== null && hovered !== selected && this.touches(line, hovered));
  }

  // Whether a line carries what an item computes, or what it reads, to where it is read.
  touches(line, id) {
    const { model } = this;
    if (line.values.some((value) => model.contains(id, value)) && !(line.target >= 0 && this.isWithin(line.target, id))) return true;
    if (line.target < 0 || !(line.target === id || this.isWithin(id, line.target))) return false;
    if (!model.isFolder(id)) return line.values.some((value) => model.inputs[id].includes(value));
    return line.values.some((value) => model.users[value].some((user) => model.contains(id, user)));
  }

  isWithin(id, folder) {
    return this.model.isFolder(folder) && id !== folder && this.model.contains(folder, this.model.first(id))
      && (!this.model.isFolder(id) || id > folder);
  }

  paintLines(lines, x, y, colour, width) {
    if (!lines.length) return;
    const { context } = this;
    const isFine = this.scale > TYPE;
    context.beginPath();
    for (const line of lines) this.traceLine(line, x, y, isFine);
    context.strokeStyle = colour;
    context.lineWidth = Math.max(width, 0.6 / this.scale);
    context.stroke();
    if (!isFine) return;
    context.beginPath();
    for (const line of lines) {
      if (!line.hasArrow || line.stub) continue;
      const [endX, endY] = [x + line.points.at(-2), y + line.points.at(-1)];
      context.moveTo(endX, endY);
      context.lineTo(endX - 3.6, endY - 7);
      context.lineTo(endX + 3.6, endY - 7);
    }
    context.fillStyle = colour;
    context.fill();
  }

  traceLine(line, x, y, isFine) {
    const { context } = this;
    const { points } = line;
    if (line.stub && !this.isBright(line)) {
      this.traceStub(x + points[0], y + points[1], 1);
      this.traceStub(x + points[2], y + points[3], -1);
      return;
    }
    context.moveTo(x + points[0], y + points[1]);
    for (let index = 2; index < points.length; index += 2) {
      const [fromX, fromY] = [x + points[index - 2], y + points[index - 1]];
      const [toX, toY] = [x + points[index], y + points[index + 1]];
      if (line.stub || !isFine || Math.abs(fromX - toX) < 0.5) {
        context.lineTo(toX, toY);
      } else {
        const middle = (fromY + toY) / 2;
        context.bezierCurveTo(fromX, middle, toX, middle, toX, toY);
      }
    }
  }

  // The end of a line that is too long to draw: it shows in full when one of its ends is chosen.
  traceStub(x, y, direction) {
    const end = y + 11 * direction;
    this.context.moveTo(x, y);
    this.context.lineTo(x, end);
    this.context.moveTo(x + 2.5, end + 2.5 * direction);
    this.context.arc(x, end + 2.5 * direction, 2.5, 0, 7);
  }

  paintOpen(box, x, y) {
    const { context, colours } = this;
    if (Math.max(box.w, box.h) * this.scale < 6) {
      context.fillStyle = colours.line;
      context.fillRect(x, y, box.w, box.h);
      return;
    }
    const isSelected = this.state.selected === box.id;
    context.beginPath();
    context.roundRect(x, y, box.w, box.h, 9);
    context.fillStyle = colours.folder;
    context.fill();
    context.strokeStyle = isSelected ? colours.accent : colours.line;
    context.lineWidth = isSelected ? 2 : Math.max(1, 0.5 / this.scale);
    context.stroke();
    this.paintInside(box, x, y);
    this.titles.push([box, x, y]);
  }

  // Titles come last, over the lines that enter the folder. From afar they are as large as on the screen.
  paintTitle(box, x, y) {
    const { context, colours, model, scale } = this;
    const isFar = scale < TYPE;
    const size = isFar ? 1 / scale : 1;
    if (isFar && (box.w * scale < 90 || box.h * scale < 46)) return;
    const label = shorten(model.labelOf(box.id));
    const rest = [model.typeOf(box.id), model.rowOf(box.id)].filter(Boolean).join(" · ");
    const labelWidth = this.measure(label, "label");
    const restWidth = isFar ? 0 : this.measure(rest, "subtitle") + 10;
    context.save();
    context.translate(x, y);
    context.scale(size, size);
    context.beginPath();
    context.roundRect(8, 5, labelWidth + restWidth + 28, 20, 6);
    context.fillStyle = colours.paper;
    context.globalAlpha = 0.86;
    context.fill();
    context.globalAlpha = 1;
    this.paintTwist(14, 15, true);
    context.font = FONTS.label;
    context.fillStyle = this.state.selected === box.id ? colours.accent : colours.text;
    context.fillText(label, 27, 15.5);
    if (this.state.ticked.has(box.id)) this.paintTick(labelWidth + restWidth + 40, 9.5);
    if (!isFar) {
      context.font = FONTS.subtitle;
      context.fillStyle = colours.dim;
      context.fillText(rest, 27 + labelWidth + 8, 15.5);
    }
    context.restore();
  }

  paintTwist(x, y, isOpen) {
    const { context } = this;
    context.beginPath();
    if (isOpen) {
      context.moveTo(x, y - 2);
      context.lineTo(x + 4, y + 2.5);
      context.lineTo(x + 8, y - 2);
    } else {
      context.moveTo(x + 2, y - 4);
      context.lineTo(x + 6.5, y);
      context.lineTo(x + 2, y + 4);
    }
    context.strokeStyle = this.colours.dim;
    context.lineWidth = 1.6;
    context.stroke();
  }

  paintClosed(box, x, y) {
    const { context, colours, model, state, scale } = this;
    const isFolder = model.isFolder(box.id);
    const kind = isFolder ? "" : model.text("kind", box.id);
    if (scale < 0.12) {
      context.fillStyle = isFolder ? colours.dim : colours[kind];
      context.fillRect(x, y, box.w, box.h);
      this.paintFound(box, x, y);
      return;
    }
    const isSelected = state.selected === box.id;
    if (isFolder) this.paintStack(box, x, y);
    context.beginPath();
    context.roundRect(x, y, box.w, box.h, 6);
    context.fillStyle = colours.card;
    context.fill();
    if (kind) {
      context.save();
      context.clip();
      context.fillStyle = colours[kind];
      context.fillRect(x, y, 4, box.h);
      context.restore();
    }
    const isMarked = !isFolder && model.isMarked(box.id);
    context.strokeStyle = isSelected ? colours.accent : isMarked ? colours.mark : state.hovered === box.id ? colours.dim : colours.line;
    context.lineWidth = isSelected || isMarked ? 2 : 1;
    context.beginPath();
    context.roundRect(x, y, box.w, box.h, 6);
    context.stroke();
    this.paintFound(box, x, y);
    if (box.picture) this.paintPicture(box, x, y);
    if (state.ticked.has(box.id)) this.paintTick(x + box.w - 15, y + 4);
    if (scale < TYPE) return;
    const hasSubtitle = box.subtitle && scale >= SMALL_TYPE;
    const middle = y + (hasSubtitle ? 13.5 : box.text / 2 + 0.5);
    if (isFolder) this.paintTwist(x + 11, middle - 0.5, false);
    context.font = FONTS.label;
    context.fillStyle = kind === "number" || kind === "check" || kind === "constant" ? colours.dim : colours.text;
    context.fillText(box.label, x + (isFolder ? 25 : 14), middle);
    if (!hasSubtitle) return;
    context.font = FONTS.subtitle;
    context.fillStyle = colours.dim;
    context.fillText(box.subtitle, x + 14, y + 28);
  }

  paintPicture(box, x, y) {
    const { context } = this;
    const { picture } = box;
    const size = Math.min(PICTURE / picture.height, (box.w - 28) / picture.width);
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, x + 14, y + box.text, picture.width * size, picture.height * size);
  }

  paintTick(x, y) {
    const { context, colours } = this;
    context.beginPath();
    context.roundRect(x, y, 11, 11, 3);
    context.fillStyle = colours.accent;
    context.fill();
    context.beginPath();
    context.moveTo(x + 2.5, y + 5.5);
    context.lineTo(x + 4.8, y + 8);
    context.lineTo(x + 8.8, y + 3);
    context.strokeStyle = colours.card;
    context.lineWidth = 1.6;
    context.stroke();
  }

  paintStack(box, x, y) {
    const { context, colours } = this;
    context.fillStyle = colours.card;
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    for (const step of this.model.rowOf(box.id) ? [6, 3] : [3]) {
      context.beginPath();
      context.roundRect(x + step, y + step, box.w, box.h, 6);
      context.fill();
      context.stroke();
    }
  }

  paintFound(box, x, y) {
    const { found } = this.state;
    if (!found.length) return;
    const isFound = this.model.isFolder(box.id) ? hasBetween(found, this.model.start[box.id - this.model.size], this.model.end[box.id - this.model.size]) : hasBetween(found, box.id, box.id + 1);
    if (!isFound) return;
    const { context } = this;
    context.beginPath();
    context.roundRect(x - 3, y - 3, box.w + 6, box.h + 6, 8);
    context.strokeStyle = this.colours.found;
    context.lineWidth = Math.max(2, 1.5 / this.scale);
    context.stroke();
  }
}

// Whether a sorted list has a number from `start` up to, and without, `end`.
function hasBetween(sorted, start, end) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < start) low = middle + 1;
    else high = middle;
  }
  return low < sorted.length && sorted[low] < end;
}
