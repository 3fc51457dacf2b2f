/**
 * Commands in documents of the API.
 *
 *   commandOf(request)      the command of a tuning's request, or null where a workload is described
 *   takesUpdates(command)   whether it takes the number of updates that it makes
 */

export function commandOf({ spec }) {
  return spec.model.kind === "command" ? spec.model : null;
}

/** `{{updates}}` is a literal text. */
export function takesUpdates({ argv, environment, files }) {
  const texts = [...argv, ...Object.values(environment), ...Object.values(files)];
  return texts.some((text) => /\{updates\}/.test(text.replaceAll("{{updates}}", "")));
}
