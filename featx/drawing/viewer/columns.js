// Layered drawing, second half: where each vertex of ordered layers stands from left to right (Brandes and Koepf, 2002).
// Chains of operations come out straight: a line beside them gives way.

function placeColumns(layers, widths, space) {
  const passes = [];
  const isBlocked = crossingLines(layers);
  for (const isDown of [true, false]) {
    for (const isLeft of [true, false]) {
      const rows = (isDown ? layers.layers : layers.layers.slice().reverse()).map((layer) => (isLeft ? layer : layer.slice().reverse()));
      const blocks = alignVertices(rows, alignable(layers, isDown), isBlocked, layers.size);
      const x = compact(rows, blocks, widths, space);
      passes.push({ isLeft, x: isLeft ? x : x.map((value) => -value) });
    }
  }
  return balance(passes, widths, layers.size);
}

// For each vertex, those of the layer before with which it may share a column.
function alignable(layers, isDown) {
  const back = isDown ? layers.up : layers.down;
  const forth = isDown ? layers.down : layers.up;
  const isReal = (vertex) => !layers.isBend[vertex];
  const hasReal = (list) => list.some(isReal);
  return back.map((near, vertex) => {
    if (!near.length) return near;
    if (isReal(vertex)) return hasReal(near) ? near.filter(isReal) : near;
    return near.filter((other) => layers.isBend[other] || !hasReal(forth[other]));
  });
}

// Lines of several layers stay straight where a short edge crosses them. Returns a test for such an edge.
function crossingLines(layers) {
  const blocked = new Set();
  const { place, isBend, up } = layers;
  for (const [rank, layer] of layers.layers.entries()) {
    if (!rank) continue;
    const lines = [];
    for (const vertex of layer) {
      if (!isBend[vertex]) continue;
      const above = up[vertex].find((other) => isBend[other]);
      if (above !== undefined) lines.push([place[above], place[vertex]]);
    }
    if (!lines.length) continue;
    for (const vertex of layer) {
      for (const above of up[vertex]) {
        if (isBend[vertex] && isBend[above]) continue;
        const crosses = ([a, b]) => (a < place[above] && b > place[vertex]) || (a > place[above] && b < place[vertex]);
        if (lines.length < 64 && lines.some(crosses)) blocked.add(above * layers.size + vertex);
      }
    }
  }
  return (one, other) => blocked.has(one * layers.size + other) || blocked.has(other * layers.size + one);
}

function alignVertices(rows, near, isBlocked, size) {
  const root = Int32Array.from({ length: size }, (_, vertex) => vertex);
  const next = Int32Array.from(root);
  const place = new Int32Array(size);
  rows.forEach((row) => row.forEach((vertex, index) => { place[vertex] = index; }));
  for (const row of rows) {
    let last = -1;
    for (const vertex of row) {
      const sorted = near[vertex].length > 1 ? near[vertex].slice().sort((a, b) => place[a] - place[b]) : near[vertex];
      if (!sorted.length) continue;
      const middle = (sorted.length - 1) / 2;
      for (let index = Math.floor(middle); index <= Math.ceil(middle); index++) {
        const other = sorted[index];
        if (next[vertex] !== vertex || place[other] <= last || isBlocked(other, vertex)) continue;
        next[other] = vertex;
        root[vertex] = root[other];
        next[vertex] = root[vertex];
        last = place[other];
      }
    }
  }
  return root;
}

// Push each block of aligned vertices as far left as its neighbours allow, then back to the right where there is room.
function compact(rows, root, widths, space) {
  const size = root.length;
  const left = Array.from({ length: size }, () => []);
  const right = Array.from({ length: size }, () => []);
  for (const row of rows) {
    for (let index = 1; index < row.length; index++) {
      const [one, other] = [row[index - 1], row[index]];
      const distance = (widths[one] + widths[other]) / 2 + space(one, other);
      left[root[other]].push([root[one], distance]);
      right[root[one]].push([root[other], distance]);
    }
  }
  const roots = [];
  root.forEach((own, vertex) => { if (own === vertex) roots.push(vertex); });
  const order = sortBlocks(roots, left);
  const x = new Float64Array(size);
  for (const block of order) for (const [other, distance] of left[block]) x[block] = Math.max(x[block], x[other] + distance);
  for (const block of order.reverse()) {
    const most = right[block].reduce((least, [other, distance]) => Math.min(least, x[other] - distance), Infinity);
    if (most !== Infinity) x[block] = Math.max(x[block], most);
  }
  return Array.from(root, (own) => x[own]);
}

// Blocks with those on their left ahead of them.
function sortBlocks(roots, left) {
  const order = [];
  const state = new Map();
  for (const start of roots) {
    const pending = [start];
    while (pending.length) {
      const block = pending.at(-1);
      if (!state.has(block)) {
        state.set(block, 1);
        for (const [other] of left[block]) if (!state.has(other)) pending.push(other);
      } else {
        pending.pop();
        if (state.get(block) === 1) {
          state.set(block, 2);
          order.push(block);
        }
      }
    }
  }
  return order;
}

// Shift the four drawings to the edges of the narrowest, and take the mean of the middle two for each vertex.
function balance(passes, widths, size) {
  for (const pass of passes) {
    pass.low = Infinity;
    pass.high = -Infinity;
    pass.x.forEach((x, vertex) => {
      pass.low = Math.min(pass.low, x - widths[vertex] / 2);
      pass.high = Math.max(pass.high, x + widths[vertex] / 2);
    });
  }
  const narrow = passes.reduce((best, pass) => (pass.high - pass.low < best.high - best.low ? pass : best));
  const shifts = passes.map((pass) => (pass.isLeft ? narrow.low - pass.low : narrow.high - pass.high));
  const result = new Float64Array(size);
  let low = Infinity;
  for (let vertex = 0; vertex < size; vertex++) {
    const values = passes.map((pass, index) => pass.x[vertex] + shifts[index]).sort((a, b) => a - b);
    result[vertex] = (values[1] + values[2]) / 2;
    low = Math.min(low, result[vertex] - widths[vertex] / 2);
  }
  return result.map((x) => x - low);
}
