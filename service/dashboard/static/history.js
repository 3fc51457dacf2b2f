/**
 * The updates of a run as far as a picture needs them: each, until there are too many; then every second of them, and so on.
 *
 *   const history = makeHistory(2000); history.add(progress); history.rows(); history.splits(); history.splitUpdates()
 *
 * The newest updates with a split are kept apart, whatever becomes of the others: `splits`; `splitUpdates` is how many
 * there were. After a restart from a checkpoint updates come again: the newer ones count.
 */

const MOST_SPLITS = 100;

export function makeHistory(most) {
  let rows = [];
  let stride = 1;
  let splits = [];
  let forgotten = 0;

  function add(progress) {
    dropFrom(rows, progress.update);
    dropFrom(splits, progress.update);
    rows.push(progress);
    if (progress.splits.length > 0) {
      splits.push(progress);
    }
    if (splits.length > 2 * MOST_SPLITS) {
      forgotten += splits.length - MOST_SPLITS;
      splits = splits.slice(-MOST_SPLITS);
    }
    if (rows.length > most) {
      stride *= 2;
      const last = rows.at(-1);
      rows = rows.filter((row) => row.update % stride === 0 || row === last);
    }
  }
  return {
    add,
    rows: () => rows,
    splits: () => splits.slice(-MOST_SPLITS),
    splitUpdates: () => forgotten + splits.length,
    /** Forgets everything: the events come again from the first. */
    clear() {
      rows = [];
      splits = [];
      stride = 1;
      forgotten = 0;
    },
  };
}

function dropFrom(rows, update) {
  while (rows.length > 0 && rows.at(-1).update >= update) {
    rows.pop();
  }
}
