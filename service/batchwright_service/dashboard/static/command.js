/**
 * Models and commands in documents of the API.
 *
 *   commandOf(request)      the command of a tuning's request, or null where a workload is described
 *   modelName(model)        its short name, as lists have it
 *   takesUpdates(command)   whether it takes the number of updates that it makes
 */

export function commandOf({ spec }) {
  return spec.model.kind === "command" ? spec.model : null;
}

/** The short name of a model. */
export function modelName({ kind, name, argv, config, pretrained, revision, architecture, target }) {
  return { command: name ?? argv?.[0], transformers: revision ? pretrained : config?.model_type ?? pretrained, reference: architecture?.name, python: target }[kind];
}

/** `{{updates}}` is a literal text. */
export function takesUpdates({ argv, environment, files }) {
  const texts = [...argv, ...Object.values(environment), ...Object.values(files)];
  return texts.some((text) => /\{updates\}/.test(text.replaceAll("{{updates}}", "")));
}
