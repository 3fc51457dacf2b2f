/**
 * The schemas of a form for registered commands, made from what the operator has registered.
 *
 *   commandDocument(document, commands)   the API's document with the schema `CommandSubmission` in addition
 */

const REFERENCE = "#/components/schemas/";

/** Returns the document with a schema of submissions whose model is one of the commands of `GET /v1/commands`. */
export function commandDocument(document, commands) {
  const schemas = { ...document.components.schemas };
  const mapping = {};
  for (const command of commands) {
    schemas[`command ${command.name}`] = schemaOf(command);
    mapping[command.name] = `${REFERENCE}command ${command.name}`;
  }
  const model = { description: "", discriminator: { propertyName: "name", mapping }, oneOf: Object.values(mapping).map(($ref) => ({ $ref })) };
  const spec = { type: "object", required: ["model"], properties: { model } };
  const { properties, ...submission } = schemas.TuningSubmission;
  schemas.CommandSubmission = { ...submission, properties: { ...properties, spec } };
  return { ...document, components: { schemas } };
}

function schemaOf(command) {
  const properties = { kind: { const: "command" }, name: { const: command.name }, arguments: argumentsOf(command) };
  return { type: "object", properties, required: ["kind", "name"] };
}

function argumentsOf(command) {
  const given = command.arguments;
  const properties = Object.fromEntries(Object.entries(given.properties).map(([name, schema]) => [name, withBounds(schema)]));
  const sentences = [command.title === command.name ? "" : `${command.title}.`, command.description, `Runs \`${command.argv.join(" ")}\`.`];
  return { ...given, properties, description: sentences.filter(Boolean).join(" ") };
}

/** Returns a schema whose description ends with the values that it allows. */
function withBounds(schema) {
  const bounds = [
    schema.minimum !== undefined && `From ${schema.minimum} to ${schema.maximum}.`,
    schema.type === "string" && schema.enum === undefined && schema.minLength !== undefined && `At most ${schema.maxLength} characters.`,
    schema.minLength !== undefined && schema.pattern !== undefined && `Matches \`${schema.pattern}\`.`,
  ];
  return { ...schema, description: [schema.description, ...bounds].filter(Boolean).join(" ") };
}
