document.querySelectorAll("table.sortable").forEach(function (table) {
  var body = table.tBodies[0];
  table.querySelectorAll("th button").forEach(function (button) {
    button.addEventListener("click", function () {
      var head = button.parentNode, at = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("th").forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      Array.prototype.map.call(body.rows, function (row, i) {
        return { row: row, i: i, key: row.cells[at].getAttribute("data-sort") };
      }).sort(function (a, b) {
        var x = parseFloat(a.key), y = parseFloat(b.key);
        var order = isNaN(x) || isNaN(y) ? a.key.localeCompare(b.key) : x - y;
        return (up ? order : -order) || a.i - b.i;
      }).forEach(function (found) { body.appendChild(found.row); });
    });
  });
});
