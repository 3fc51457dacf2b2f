/**
 * The updates of a run for a chart: every update, then every second, every fourth and so on as they become too many.
 *
 *   const history = makeHistory(2000); history.add(progress); history.rows(); history.splits(); history.splitUpdates();
 *   history.evaluations()
 *
 * The newest updates with a split are kept in `splits`; `splitUpdates` is the number of all of them. Evaluations are
 * thinned as updates are, but for the best and the newest. After a restart from a checkpoint, a repeated update or
 * evaluation replaces the earlier one.
 */

const MOST_SPLITS = 100;

export function makeHistory(most) {
  let rows = [];
  let stride = 1;
  let splits = [];
  let dropped = 0;
  let evaluations = [];

  function add(progress) {
    dropFrom(rows, progress.update);
    dropFrom(splits, progress.update);
    dropFrom(evaluations, progress.update);
    for (const evaluation of progress.evaluations ?? []) { // none of a command
      dropFrom(evaluations, evaluation.update);
      evaluations.push(evaluation);
    }
    if (evaluations.length > most) {
      const [best, last] = [bestOf(evaluations), evaluations.at(-1)];
      evaluations = evaluations.filter((row, index) => index % 2 === 0 || row === best || row === last);
    }
    rows.push(progress);
    if (progress.splits?.length > 0) { // none of a command
      splits.push(progress);
    }
    if (splits.length > 2 * MOST_SPLITS) {
      dropped += splits.length - MOST_SPLITS;
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
    splitUpdates: () => dropped + splits.length,
    evaluations: () => evaluations,
    /** Drops everything, before the events are read again from the first. */
    clear() {
      rows = [];
      splits = [];
      evaluations = [];
      stride = 1;
      dropped = 0;
    },
  };
}

/** The evaluation with the best weights so far, if there is one. */
export function bestOf(evaluations) {
  return evaluations.findLast((row) => row.is_best) ?? null;
}

function dropFrom(rows, update) {
  while (rows.length > 0 && rows.at(-1).update >= update) {
    rows.pop();
  }
}
