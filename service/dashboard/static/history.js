/**
 * The updates of a run as far as a picture needs them: each, until there are too many; then every second of them, and so on.
 *
 *   const history = makeHistory(2000); history.add(progress); history.rows(); history.splits()
 *
 * Updates with a split are always kept. After a restart from a checkpoint updates come again: the newer ones count.
 */

export function makeHistory(most) {
  let rows = [];
  let stride = 1;

  function add(progress) {
    while (rows.length > 0 && rows.at(-1).update >= progress.update) {
      rows.pop();
    }
    rows.push(progress);
    if (rows.length > most) {
      stride *= 2;
      const last = rows.at(-1);
      rows = rows.filter((row) => row.update % stride === 0 || row.splits.length > 0 || row === last);
    }
  }
  return {
    add,
    rows: () => rows,
    splits: () => rows.filter((row) => row.splits.length > 0),
  };
}
