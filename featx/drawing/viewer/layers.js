// Layered drawing, first half: put the vertices of a small graph into layers and order each layer so that few edges
// cross (Sugiyama, Tagawa and Toda, 1981). Vertices are numbers; edges go forward in their order.

// An edge longer than this is drawn as two stubs, and so are the longest ones where there are too many.
const LONGEST_LINE = 100;

class Layers {
  // `pins` may say "top" or "bottom" of a vertex. Lines that leave a vertex with the same key share their way.
  constructor(count, edges, pins = []) {
    this.count = count;
    this.edges = edges; // {from, to, key}; gets `way`: the vertices on the way, or `stub`: true
    this.rank = rankVertices(count, edges, pins);
    this.isBend = new Uint8Array(count);
    this.joined = new Set();
    this.up = Array.from({ length: count }, () => []);
    this.down = Array.from({ length: count }, () => []);
    this.route();
    this.order();
  }

  get size() { return this.up.length; }

  // Lay a line from layer to layer behind each vertex, as far as its farthest reader.
  route() {
    const rank = Array.from(this.rank);
    const trunks = new Map();
    for (const edge of this.edges) {
      const key = `${edge.from} ${edge.key}`;
      const trunk = trunks.get(key) ?? { from: edge.from, edges: [], bends: [] };
      trunk.edges.push(edge);
      trunks.set(key, trunk);
    }
    let room = 4 * this.count + 2000;
    for (const trunk of trunks.values()) {
      trunk.span = trunk.edges.reduce((most, edge) => Math.max(most, rank[edge.to]), 0) - rank[trunk.from];
    }
    for (const trunk of [...trunks.values()].sort((a, b) => a.span - b.span)) {
      trunk.edges.sort((a, b) => rank[a.to] - rank[b.to]);
      for (const edge of trunk.edges) {
        const bends = rank[edge.to] - rank[edge.from] - 1;
        if (bends > LONGEST_LINE || bends - trunk.bends.length > room) {
          edge.stub = true;
          continue;
        }
        while (trunk.bends.length < bends) {
          const bend = this.up.length;
          rank.push(rank[edge.from] + trunk.bends.length + 1);
          this.up.push([]);
          this.down.push([]);
          this.join(trunk.bends.at(-1) ?? edge.from, bend);
          trunk.bends.push(bend);
          room--;
        }
        edge.way = trunk.bends.slice(0, Math.max(bends, 0));
        this.join(edge.way.at(-1) ?? edge.from, edge.to);
      }
    }
    this.rank = rank;
    this.isBend = Uint8Array.from({ length: this.size }, (_, vertex) => (vertex < this.count ? 0 : 1));
  }

  join(above, below) {
    const key = above * 2 ** 26 + below;
    if (this.joined.has(key)) return;
    this.joined.add(key);
    this.down[above].push(below);
    this.up[below].push(above);
  }

  // Move vertices to the mean of their neighbours, down and up a few times; keep the best order that was seen.
  order() {
    const depth = this.rank.reduce((most, rank) => Math.max(most, rank + 1), 0);
    this.layers = Array.from({ length: depth }, () => []);
    this.rank.forEach((rank, vertex) => this.layers[rank].push(vertex));
    this.place = new Int32Array(this.size);
    this.layers.forEach((layer) => this.number(layer));
    if (this.layers.every((layer) => layer.length < 2)) return;
    let best = { crossings: this.crossings(), layers: this.layers.map((layer) => layer.slice()) };
    for (let round = 0; round < (this.size > 3000 ? 2 : 8) && best.crossings; round++) {
      const isDown = round % 2 === 0;
      const sweep = isDown ? this.layers : this.layers.slice().reverse();
      for (const layer of sweep) this.sort(layer, isDown ? this.up : this.down);
      const crossings = this.crossings();
      if (crossings < best.crossings) best = { crossings, layers: this.layers.map((layer) => layer.slice()) };
    }
    this.layers = best.layers;
    this.layers.forEach((layer) => this.number(layer));
  }

  number(layer) { layer.forEach((vertex, place) => { this.place[vertex] = place; }); }

  sort(layer, neighbours) {
    if (layer.length < 2) return;
    const means = new Map(layer.map((vertex) => {
      const near = neighbours[vertex];
      return [vertex, near.length ? near.reduce((sum, other) => sum + this.place[other], 0) / near.length : this.place[vertex]];
    }));
    layer.sort((a, b) => means.get(a) - means.get(b));
    this.number(layer);
  }

  // Pairs of edges between neighbouring layers that cross (Barth, Juenger and Mutzel, 2002).
  crossings() {
    let total = 0;
    for (let rank = 1; rank < this.layers.length; rank++) {
      const width = this.layers[rank].length;
      if (width < 2 || this.layers[rank - 1].length < 2) continue;
      const tree = new Int32Array(width + 1);
      let seen = 0;
      for (const above of this.layers[rank - 1]) {
        const ends = this.down[above].map((below) => this.place[below]);
        for (const end of ends) {
          let upTo = 0;
          for (let i = end + 1; i > 0; i -= i & -i) upTo += tree[i];
          total += seen - upTo;
        }
        for (const end of ends) {
          for (let i = end + 1; i <= width; i += i & -i) tree[i]++;
          seen++;
        }
      }
    }
    return total;
  }
}

// Longest paths from the top; what depends on no input stands just above its first reader, unless it is pinned.
function rankVertices(count, edges, pins) {
  const rank = new Int32Array(count);
  const below = Array.from({ length: count }, () => []);
  const isFixed = Uint8Array.from({ length: count }, (_, vertex) => (pins[vertex] === "top" ? 1 : 0));
  const hasTop = pins.includes("top");
  for (const edge of edges) below[edge.from].push(edge.to);
  for (let vertex = 0; vertex < count; vertex++) {
    if (hasTop && pins[vertex] !== "top") rank[vertex] = Math.max(rank[vertex], 1);
    for (const other of below[vertex]) {
      rank[other] = Math.max(rank[other], rank[vertex] + 1);
      if (isFixed[vertex]) isFixed[other] = 1;
    }
  }
  for (let vertex = count - 1; vertex >= 0; vertex--) {
    if (isFixed[vertex] || !below[vertex].length) continue;
    rank[vertex] = below[vertex].reduce((least, other) => Math.min(least, rank[other]), Infinity) - 1;
  }
  const last = rank.reduce((most, value, vertex) => (pins[vertex] === "bottom" ? most : Math.max(most, value)), 0) + 1;
  pins.forEach((pin, vertex) => { if (pin === "bottom") rank[vertex] = last; });
  return rank;
}
