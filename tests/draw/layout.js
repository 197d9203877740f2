// What is wrong with the drawing as it is now, in words; for the tests, which run it in the page.
(() => {
  const { model, diagram, state } = window.page;
  const wrong = [];
  const seen = new Map();
  const lines = [];
  const boxes = [];
  const walk = (box, x, y) => {
    const items = box.items.map((item) => ({ id: item.box.id, x: x + item.x, y: y + item.y, w: item.box.w, h: item.box.h, box: item.box }));
    items.forEach((item, index) => {
      seen.set(item.id, item);
      boxes.push(item);
      if (item.x < x - 0.01 || item.y < y - 0.01 || item.x + item.w > x + box.w + 0.01 || item.y + item.h > y + box.h + 0.01) {
        wrong.push(`${model.labelOf(item.id)} sticks out of ${model.labelOf(box.id)}`);
      }
      for (const other of items.slice(0, index)) {
        if (item.x < other.x + other.w && other.x < item.x + item.w && item.y < other.y + other.h && other.y < item.y + item.h) {
          wrong.push(`${model.labelOf(item.id)} lies on ${model.labelOf(other.id)}`);
        }
      }
    });
    for (const line of box.lines) {
      lines.push(line);
      const { points } = line;
      for (let index = 2; index < points.length; index += 2) {
        const [x0, y0, x1, y1] = points.slice(index - 2, index + 2);
        if (y1 < y0 - 0.01) wrong.push(`a line into ${line.target} goes up`);
        if (line.stub) continue;
        // Curves stay between the layers, so a box is in the way only of what goes straight down, or of a curve beside it.
        for (const item of items) {
          if (item.id === line.source || item.id === line.target) continue;
          const [left, top] = [item.x - x, item.y - y];
          const [low, high] = [Math.min(x0, x1), Math.max(x0, x1)];
          if (high > left + 0.5 && low < left + item.w - 0.5 && y1 > top + 0.5 && y0 < top + item.h - 0.5) {
            wrong.push(`a line from ${line.source} to ${line.target} runs through ${model.labelOf(item.id)}`);
          }
        }
      }
      const end = items.find((item) => item.id === line.target);
      const isPort = (id) => state.open.has(id);
      if (line.values.length > 1 && (isPort(line.source) || isPort(line.target))) wrong.push(`values share a port of ${line.source} or ${line.target}`);
      if (end && !(Math.abs(points.at(-1) - (end.y - y)) < 0.01 && points.at(-2) >= end.x - x && points.at(-2) <= end.x - x + end.w)) {
        wrong.push(`a line does not reach ${model.labelOf(line.target)}`);
      }
      const start = items.find((item) => item.id === line.source);
      if (start && !(Math.abs(points[1] - (start.y + start.h - y)) < 0.01 && points[0] >= start.x - x && points[0] <= start.x - x + start.w)) {
        wrong.push(`a line does not leave ${model.labelOf(line.source)}`);
      }
    }
    for (const item of items) if (item.box.isOpen) walk(item.box, item.x, item.y);
  };
  walk(diagram.boxes.root, 0, 0);
  for (const { box } of boxes) {
    const type = (text, kind) => { if (diagram.measure(text, kind) > box.w - 20) wrong.push(`${text} is wider than its box`); };
    if (box.isOpen) type(model.labelOf(box.id).slice(0, 34), "label");
    else { type(box.label, "label"); type(box.subtitle, "subtitle"); }
  }
  // Every value gets from the box that shows its node to the boxes that show its readers.
  const shown = (node) => {
    let id = node;
    while (!seen.has(id) && id >= 0) id = model.parent(id);
    return id;
  };
  const reached = new Set(lines.flatMap((line) => line.values.map((value) => `${value} ${line.target}`)));
  const left = new Set(lines.flatMap((line) => line.values.map((value) => `${value} ${line.source}`)));
  for (let node = 0; node < model.size; node++) {
    if (model.isHidden(node)) continue;
    if (shown(node) < 0) wrong.push(`${model.nameOf(node)} is nowhere`);
    for (const input of model.inputs[node]) {
      if (model.isHidden(input) || shown(input) === shown(node)) continue;
      if (!reached.has(`${input} ${shown(node)}`)) wrong.push(`no line for ${model.nameOf(input)} into ${model.nameOf(node)}`);
      if (!left.has(`${input} ${shown(input)}`)) wrong.push(`no line for ${model.nameOf(input)} from its box`);
    }
  }
  return { wrong: wrong.slice(0, 20), boxes: boxes.length, lines: lines.length, open: state.open.size };
})()
