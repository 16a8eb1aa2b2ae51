document.querySelectorAll("table.sortable").forEach(function (table) {
  var body = table.tBodies[0];
  table.querySelectorAll("th button").forEach(function (button) {
    button.addEventListener("click", function () {
      var head = button.parentNode, at = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("th").forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      var groups = [];
      Array.prototype.forEach.call(body.rows, function (row) {
        if (row.classList.contains("detail") && groups.length) groups[groups.length - 1].push(row);
        else groups.push([row]);
      });
      groups.map(function (rows, i) {
        return { rows: rows, i: i, key: rows[0].cells[at].getAttribute("data-sort") };
      }).sort(function (a, b) {
        var x = parseFloat(a.key), y = parseFloat(b.key);
        var order = isNaN(x) || isNaN(y) ? a.key.localeCompare(b.key) : x - y;
        return (up ? order : -order) || a.i - b.i;
      }).forEach(function (group) { group.rows.forEach(function (row) { body.appendChild(row); }); });
    });
  });
});
