(function () {
  var found = [], width = document.documentElement.clientWidth;
  function name(e) { return e.tagName.toLowerCase() + (e.className && e.className.baseVal === undefined ? "." + e.className : "") + " " + JSON.stringify((e.textContent || "").trim().slice(0, 40)); }
  function shown(e) { return e.checkVisibility() && e.getClientRects().length > 0; }
  if (document.documentElement.scrollWidth > width) found.push("the page is " + document.documentElement.scrollWidth + " wide, the window " + width);
  document.querySelectorAll("body *").forEach(function (e) {
    if (e.closest("svg") && e.tagName.toLowerCase() !== "svg" || !shown(e)) return;
    var box = e.getBoundingClientRect();
    if (box.right > width + 1 || box.left < -1) found.push("outside the window: " + name(e));
    if (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline" && e.clientWidth > 0) found.push("its content is wider than itself: " + name(e));
  });
  document.querySelectorAll("svg text").forEach(function (e) {
    var box = e.getBoundingClientRect();
    if (shown(e) && (box.right > width + 1 || box.left < -1)) found.push("outside the window: " + name(e));
  });
  // Text on text: every line of every visible text node, against all others that are no relatives of it.
  var boxes = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (var node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!node.data.trim() || !shown(node.parentElement) || node.parentElement.closest("script, title, [transform]")) continue;
    var range = document.createRange();
    range.selectNodeContents(node);
    Array.prototype.forEach.call(range.getClientRects(), function (r) { if (r.width > 1) boxes.push({ r: r, e: node.parentElement }); });
  }
  boxes.sort(function (a, b) { return a.r.top - b.r.top; });
  boxes.forEach(function (a, i) {
    for (var j = i + 1; j < boxes.length && boxes[j].r.top < a.r.bottom - 4; j++) {
      var b = boxes[j].r;
      if (Math.min(a.r.right, b.right) - Math.max(a.r.left, b.left) > 2 && Math.min(a.r.bottom, b.bottom) - b.top > 4)
        found.push("overlap: " + name(a.e) + " and " + name(boxes[j].e));
    }
  });
  // Boxes on boxes: the children of every grid or column must not cover each other.
  document.querySelectorAll(".cards, .two, .samples, .tensors, .coverage, .series, .stages, main, summary, .tensor").forEach(function (parent) {
    var children = Array.prototype.filter.call(parent.children, shown).map(function (e) { return { e: e, r: e.getBoundingClientRect() }; });
    children.forEach(function (a, i) {
      children.slice(i + 1).forEach(function (b) {
        var x = Math.min(a.r.right, b.r.right) - Math.max(a.r.left, b.r.left), y = Math.min(a.r.bottom, b.r.bottom) - Math.max(a.r.top, b.r.top);
        if (x > 1 && y > 1) found.push("overlap: " + name(a.e) + " and " + name(b.e));
      });
    });
  });
  document.querySelectorAll("section, header.verdict").forEach(function (s) {
    var rest = (s.innerText || "").replace((s.querySelector("h1, h2") || {}).innerText || "", "").trim();
    if (rest.length < 20 || s.getBoundingClientRect().height < 60) found.push("empty: " + s.id);
  });
  document.querySelectorAll("img").forEach(function (i) { if (!i.complete || !i.naturalWidth) found.push("broken image: " + i.alt); });
  return found;
})()
