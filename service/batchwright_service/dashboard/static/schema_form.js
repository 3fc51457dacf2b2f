/**
 * A form generated from a JSON schema of the API's document, with a field for every field of the schema.
 *
 *   const form = useForm(document, "TuningSubmission", {choices: {device: [["", "any"], ["cpu", "the processor"]]}})
 *   html`<${Field} form=${form} path="spec.model" />`      a field, or a group of them, by its dotted path
 *   form.rest("spec", ["spec.model"])   the paths of the fields of an object, without those that are shown elsewhere
 *   form.read()                   {value, problems, missing}; fields left at their defaults are omitted, missing ones are required
 *   form.write(value, name)       fills it in; `name` changes the schema
 *   form.unknownFields(value, name)   problems: parts of a value without a field, which `write` leaves out
 *   form.place(problems)          shows messages beside their fields; returns the problems without a field
 *
 * A problem is {field: dotted path, message}, as the service sends them.
 */

import { withCode } from "./components.js";
import { html, useLayoutEffect, useRef, useState } from "./preact-htm.js";

const UNITS = { "": 1, b: 1, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12 };
const NUMBER = /^[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const SIZE = /^([\d.]+)\s*([kmgt]?i?b?)$/i;

/**
 * A form over the schema `first` of an OpenAPI document.
 *
 * @param {Object} document
 * @param {string} first  Name of the schema.
 * @param {{choices?: Object<string, string[][]>, without?: (name: string) => string[]}} options  `choices`: values with their meanings, by
 *   path, for fields of text that then offer only these. `without`: paths of a schema that have no field.
 */
export function useForm(document, first, { choices = {}, without = () => [] } = {}) {
  const { schemas } = document.components;
  const [{ name, texts }, setState] = useState({ name: first, texts: {} });
  const [errors, setErrors] = useState({});
  const rootOf = (schema) => ({ ...nodeOf(schemas, schemas[schema], "", true), without: without(schema) });
  const root = rootOf(name);
  return {
    name,
    schemas,
    texts,
    errors,
    choices,
    nodeAt: (path) => nodeAt(schemas, root, path),
    set: (path, text) => setState((before) => ({ ...before, texts: { ...before.texts, [path]: text } })),
    /** Chooses another kind of an object, whose fields are empty. */
    setKind(path, text) {
      const kept = Object.entries(texts).filter(([other]) => !other.startsWith(path.slice(0, path.lastIndexOf(".") + 1)));
      setState({ name, texts: { ...Object.fromEntries(kept), [path]: text } });
    },
    rest(path, shown) {
      const isShown = (child) => shown.some((other) => other === child || other.startsWith(`${child}.`));
      return childrenOf(schemas, nodeAt(schemas, root, path), texts).map((child) => child.path).filter((child) => !isShown(child));
    },
    read() {
      const [problems, missing] = [[], []];
      return { value: readNode(schemas, root, texts, problems, missing) ?? {}, problems, missing };
    },
    write(value, as = name) {
      setState({ name: as, texts: textsOf(schemas, rootOf(as), value) });
      setErrors({});
    },
    unknownFields: (value, as = name) => unknownFieldsIn(schemas, schemas[as], value, ""),
    place(problems) {
      const paths = pathsOf(schemas, root, texts);
      const found = problems.map((problem) => [problem, nearest(paths, problem.field)]);
      const placed = {};
      for (const [{ field, message }, path] of found.filter(([, near]) => near !== undefined)) {
        const inner = field.slice(path.length + 1);
        placed[path] = [placed[path], `${inner && `${inner}: `}${message}`].filter(Boolean).join(" ");
      }
      setErrors(placed);
      return found.filter(([, near]) => near === undefined).map(([problem]) => problem);
    },
  };
}

/** The path of the field of a problem, or of the nearest object around it. */
function nearest(paths, field) {
  return paths.filter((path) => field === path || field.startsWith(`${path}.`)).toSorted((one, other) => other.length - one.length)[0];
}

// --- the tree of fields ---------------------------------------------------------------------------------------------

/** The field of a schema: an object (`group`), one of several objects (`union`), or one value (`checkbox`, `choice`, `text`). */
function nodeOf(schemas, given, path, required) {
  const schema = resolved(schemas, given);
  const hint = given.description ?? schema.description ?? "";
  return { kind: kindOfField(schema), schema, path, required, hint, name: path.split(".").at(-1), writer: writerOf(schema, path) };
}

function kindOfField(schema) {
  if (schema.discriminator) {
    return "union";
  }
  if (schema.type === "object" && schema.properties && !isFree(schema)) {
    return "group";
  }
  return schema.type === "boolean" ? "checkbox" : schema.enum ? "choice" : "text";
}

function isObject({ kind }) {
  return kind === "group" || kind === "union";
}

function childrenOf(schemas, node, texts) {
  const { path, without = [] } = node;
  const kind = node.kind === "union" ? chosenKind(node, texts) : null;
  if (kind === "") {
    return [];
  }
  const discriminator = node.schema.discriminator;
  const schema = kind === null ? node.schema : resolved(schemas, { $ref: discriminator.mapping[kind] });
  const names = Object.keys(schema.properties).filter((name) => name !== discriminator?.propertyName && schema.properties[name].const === undefined);
  return names
    .map((name) => nodeOf(schemas, schema.properties[name], path === "" ? name : `${path}.${name}`, (schema.required ?? []).includes(name)))
    .filter((child) => !without.includes(child.path));
}

function nodeAt(schemas, root, path) {
  let node = root;
  for (const name of path === "" ? [] : path.split(".")) {
    node = childrenOf(schemas, node, {}).find((child) => child.name === name);
  }
  return node;
}

/** The path at which the chosen kind of a union is kept. */
function kindPath({ path, schema }) {
  return `${path}.${schema.discriminator.propertyName}`;
}

function chosenKind(node, texts) {
  return texts[kindPath(node)] ?? (node.required ? kindsOf(node.schema)[0] : "");
}

/** What a field of one value holds before it is filled in. */
function initial({ kind, schema, required }) {
  if (kind === "checkbox") {
    return schema.default ?? false;
  }
  return kind === "choice" ? schema.default ?? (required ? schema.enum[0] : "") : "";
}

function readNode(schemas, node, texts, problems, missing) {
  if (isObject(node)) {
    if (node.kind === "union" && chosenKind(node, texts) === "") {
      return undefined;
    }
    const lacking = [];
    const values = childrenOf(schemas, node, texts).map((child) => [child.name, readNode(schemas, child, texts, problems, lacking)]);
    const found = Object.fromEntries(values.filter(([, value]) => value !== undefined));
    if (node.required || node.kind === "union" || Object.keys(found).length > 0) {
      missing.push(...lacking);
    }
    if (node.kind === "union") {
      return { [node.schema.discriminator.propertyName]: chosenKind(node, texts), ...found };
    }
    return Object.keys(found).length === 0 ? undefined : found;
  }
  const text = texts[node.path] ?? initial(node);
  if (node.kind === "text" && text.trim() === "") {
    missing.push(...(node.required ? [node.path] : []));
    return undefined;
  }
  if (node.kind === "text") {
    return parsed(node, text.trim(), problems);
  }
  return text === initial(node) && !node.required ? undefined : text;
}

function parsed({ writer, path }, text, problems) {
  try {
    return writer.parse(text);
  } catch (error) {
    problems.push({ field: path, message: error.message });
    return undefined;
  }
}

/** What the fields hold for a value. */
function textsOf(schemas, node, value, texts = {}) {
  if (isObject(node)) {
    if (node.kind === "union") {
      const kind = value?.[node.schema.discriminator.propertyName];
      texts[kindPath(node)] = kindsOf(node.schema).includes(kind) ? kind : chosenKind(node, {});
    }
    childrenOf(schemas, node, texts).forEach((child) => textsOf(schemas, child, value?.[child.name], texts));
  } else if (value !== undefined && value !== null) {
    texts[node.path] = node.kind === "text" ? node.writer.format(value) : value;
  }
  return texts;
}

function pathsOf(schemas, node, texts) {
  const inner = isObject(node) ? childrenOf(schemas, node, texts).flatMap((child) => pathsOf(schemas, child, texts)) : [];
  return node.path === "" ? inner : [node.path, ...inner];
}

// --- fields ---------------------------------------------------------------------------------------------------------

export function Field({ form, path }) {
  return fieldOf(form, form.nodeAt(path));
}

function fieldOf(form, node) {
  return { group: objectField, union: objectField, checkbox, choice, text: textField }[node.kind](form, node);
}

/** An object: its fields below one another. One of several kinds of object: a select, and the fields of the selected kind. */
function objectField(form, node) {
  const { path, schema, required, kind } = node;
  const children = childrenOf(form.schemas, node, form.texts).map((child) => fieldOf(form, child));
  const at = kind === "union" && kindPath(node);
  const options = kind === "union" && [...(required ? [] : [["", "none"]]), ...kindsOf(schema).map((name) => [name, name])];
  return html`<fieldset key=${path} class="group" data-path=${path}>
    <legend>${labelOf(path)}</legend>
    ${hintNode(node.hint)}
    ${at && html`<div class="field"><label for=${idOf(at)}>${labelOf(at)}</label>${select(idOf(at), options, chosenKind(node, form.texts), (text) => form.setKind(at, text))}</div>`}
    ${kind === "union" ? html`<div class="group-fields">${children}</div>` : children}
    <${FieldError} path=${path} text=${form.errors[path]} />
  </fieldset>`;
}

function checkbox(form, node) {
  const { path } = node;
  const input = html`<input type="checkbox" checked=${form.texts[path] ?? initial(node)} onInput=${(event) => form.set(path, event.target.checked)} ...${described(form, path)} />`;
  return field(form, node, html`<div class="choice">${input}<label for=${idOf(path)}>${labelOf(path)}</label></div>`);
}

function choice(form, node) {
  const { path, schema, required } = node;
  const values = [...(required || schema.default !== undefined ? [] : [""]), ...schema.enum];
  return chosenFrom(form, node, values.map((value) => [value, value || "none"]), form.texts[path] ?? initial(node));
}

function chosenFrom(form, node, options, value) {
  const { path } = node;
  const input = select(idOf(path), options, value, (text) => form.set(path, text), described(form, path));
  return field(form, node, html`<label for=${idOf(path)}>${labelOf(path)}</label>${input}`);
}

function textField(form, node) {
  const { path, schema, required, writer } = node;
  const text = form.texts[path] ?? "";
  const known = form.choices[path] ?? [];
  if (known.length > 0) {
    return chosenFrom(form, node, known.some(([value]) => value === text) ? known : [...known, [text, text]], text);
  }
  const attributes = {
    class: `input ${writer.lines ? "mono" : ""}`, value: text, placeholder: placeholderOf(node), autocomplete: "off", spellcheck: false,
    inputmode: writer.inputMode, "aria-required": required ? "true" : null,
    onInput: (event) => form.set(path, event.target.value), ...described(form, path),
  };
  return field(form, node, html`
    <label for=${idOf(path)}>${labelOf(path)}${required && html`<span class="muted"> (required)</span>`}</label>
    ${writer.lines ? html`<textarea rows=${writer.lines} ...${attributes} />` : html`<input type="text" ...${attributes} />`}`);
}

/** A field of one value: its label and input, its hint, and its message. */
function field(form, { path, hint, writer, kind }, content) {
  const sentences = kind === "text" ? [hint, writer.hint].filter(Boolean).join(" ") : hint;
  return html`<div key=${path} class="field" data-path=${path}>${content}${hintNode(sentences, idOf(path))}<${FieldError} path=${path} text=${form.errors[path]} /></div>`;
}

function select(id, options, value, onChoice, attributes = {}) {
  return html`<select id=${id} class="input" value=${value} onInput=${(event) => onChoice(event.target.value)} ...${attributes}>${options.map(([key, text]) => html`<option key=${key} value=${key}>${text}</option>`)}</select>`;
}

function described(form, path) {
  const id = idOf(path);
  const isWrong = form.errors[path] !== undefined;
  return { id, "aria-describedby": `${id}-hint ${id}-error`, "aria-invalid": isWrong ? "true" : null, "aria-errormessage": isWrong ? `${id}-error` : null };
}

/** The message of a field; what hides it is opened. */
function FieldError({ path, text = "" }) {
  const place = useRef(null);
  useLayoutEffect(() => {
    if (text !== "") {
      place.current.closest("details")?.setAttribute("open", "");
    }
  }, [text]);
  return html`<p ref=${place} class="field-error" id="${idOf(path)}-error" hidden=${text === ""}>${text}</p>`;
}

function hintNode(text, id = null) {
  return html`<p class="field-hint" id=${id && `${id}-hint`}>${withCode(text)}</p>`;
}

function labelOf(path) {
  const name = path.split(".").at(-1).replaceAll("_", " ").replace("micro batch", "micro-batch");
  return name.charAt(0).toUpperCase() + name.slice(1).replace(/ bytes$/, "");
}

function placeholderOf({ name, schema, writer }) {
  if (schema.default !== undefined && schema.default !== null) {
    return writer.format(schema.default);
  }
  return schema.properties?.model_type ? '{"model_type": "gpt2"}' : name === "effective_batch_size" ? "512" : "";
}

function idOf(path) {
  return `field-${path.replaceAll(".", "-")}`;
}

// --- values ---------------------------------------------------------------------------------------------------------

/** The conversion between text and the values of a schema. */
function writerOf(schema, path) {
  if (isFree(schema) && schema.additionalProperties.type === "string") {
    return { lines: 2, parse: asPairs, format: (value) => Object.entries(value).map((pair) => pair.join("=")).join("\n"), hint: "One `key=value` a line." };
  }
  if (isFree(schema)) {
    return { lines: 5, parse: asJson, format: (value) => JSON.stringify(value, null, 2), hint: "As JSON." };
  }
  if (schema.type === "array") {
    const isText = schema.items?.type === "string";
    const [between, item] = isText ? [/\n/, (text) => text] : [/[\n,]/, asNumber]; // a path may contain a comma
    return { lines: 2, parse: (text) => text.split(between).map((part) => part.trim()).filter(Boolean).map(item), format: (value) => [value].flat().join("\n"), hint: "One a line." };
  }
  const words = wordsBesideList(schema);
  if (words.length > 0) {
    const parse = (text) => (words.includes(text) ? text : text.split(/[\n,]/).map((part) => part.trim()).filter(Boolean));
    return { lines: 2, parse, format: (value) => [value].flat().join("\n"), hint: `\`${words.join("`, `")}\`, or several, one per line or separated by commas.` };
  }
  if (path.endsWith("_bytes")) {
    return { parse: asBytes, format: sizeText, hint: "For example 24 GiB." };
  }
  if (schema.type === "integer" || schema.type === "number") {
    return { parse: asNumber, format: String, inputMode: schema.type === "integer" ? "numeric" : "decimal" };
  }
  return { parse: (text) => text, format: String };
}

/** The texts that a schema takes in place of a list of texts: of `target_modules`, `all-linear`. */
function wordsBesideList({ anyOf = [] }) {
  const isList = anyOf.some(({ type, items }) => type === "array" && items.type === "string");
  return isList ? anyOf.filter((option) => option.const !== undefined).map((option) => option.const) : [];
}

function asPairs(text) {
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  return Object.fromEntries(lines.map((line) => {
    const at = line.indexOf("=");
    if (at < 1) {
      throw new Error(`"${line}" is not a key and a value: write for example team=vision`);
    }
    return [line.slice(0, at).trim(), line.slice(at + 1).trim()];
  }));
}

function asNumber(text) {
  if (!NUMBER.test(text)) {
    throw new Error(`"${text}" is not a number`);
  }
  const value = Number(text.replaceAll("_", ""));
  if (!Number.isFinite(value) || (Number.isInteger(value) && !Number.isSafeInteger(value))) {
    throw new Error(`"${text}" is too large for an exact number in the browser: use the API`);
  }
  return value;
}

function asBytes(text) {
  const [, figure, unit] = SIZE.exec(text) ?? [];
  const factor = UNITS[(unit ?? "").toLowerCase()];
  if (figure === undefined || factor === undefined || Number.isNaN(Number(figure))) {
    throw new Error(`"${text}" is not a size: write, for example, 24 GiB or a number of bytes`);
  }
  return Math.round(Number(figure) * factor);
}

/** The bytes in the largest unit of which they are a whole number. */
function sizeText(value) {
  const name = ["TiB", "GiB", "MiB", "KiB"].find((unit) => value > 0 && value % UNITS[unit.toLowerCase()] === 0);
  return name === undefined ? String(value) : `${value / UNITS[name.toLowerCase()]} ${name}`;
}

function asJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`is not valid JSON: ${error.message}`);
  }
}

// --- schemas --------------------------------------------------------------------------------------------------------

/**
 * Returns a schema without references, and without the null of an optional value. A union without a discriminator is its
 * first alternative: of a spec, the workload. `command_form.js` has the schemas of registered commands.
 */
function resolved(schemas, schema) {
  if (schema.$ref) {
    const found = resolved(schemas, schemas[schema.$ref.split("/").at(-1)]);
    return schema.default === undefined ? found : { ...found, default: schema.default };
  }
  if (schema.oneOf && !schema.discriminator) {
    return { ...schema, oneOf: undefined, ...resolved(schemas, schema.oneOf[0]) };
  }
  const some = schema.anyOf?.filter((option) => option.type !== "null");
  return some?.length === 1 ? { ...schema, anyOf: undefined, ...optional(schemas, some[0]) } : schema;
}

/**
 * Returns the schema of an optional value. An object that has to name its kind is a union of its kinds: else nothing would tell an object with
 * only defaults, such as an adapter, from none.
 */
function optional(schemas, reference) {
  const schema = resolved(schemas, reference);
  const kind = (schema.required ?? []).find((name) => kindsIn(schema.properties?.[name]).length > 0);
  if (kind === undefined || reference.$ref === undefined) {
    return schema;
  }
  const mapping = Object.fromEntries(kindsIn(schema.properties[kind]).map((name) => [name, reference.$ref]));
  return { description: schema.description, oneOf: [reference], discriminator: { propertyName: kind, mapping } };
}

/** The kinds that a field of an object can name. */
function kindsIn(field) {
  return field?.const === undefined ? field?.enum ?? [] : [field.const];
}

/** The kinds of a union, in the order of its alternatives. */
function kindsOf({ oneOf, discriminator: { mapping } }) {
  const place = (kind) => oneOf.findIndex((option) => option.$ref === mapping[kind]);
  return Object.keys(mapping).toSorted((one, other) => place(one) - place(other));
}

/** Returns a problem for each name and kind in a value that the schema does not have. */
function unknownFieldsIn(schemas, given, value, path) {
  const schema = resolved(schemas, given);
  const inner = (name) => (path === "" ? name : `${path}.${name}`);
  if (value === null || typeof value !== "object" || Array.isArray(value) || isFree(schema)) {
    return schema.properties && !isFree(schema) && value !== null && value !== undefined && typeof value !== "object" ? [{ field: path, message: "is not a mapping" }] : [];
  }
  if (schema.discriminator) {
    const { propertyName, mapping } = schema.discriminator;
    const kind = value[propertyName];
    if (!Object.hasOwn(mapping, kind)) {
      return [{ field: inner(propertyName), message: `${JSON.stringify(kind)} is not one of ${Object.keys(mapping).join(", ")}` }];
    }
    return unknownFieldsIn(schemas, { $ref: mapping[kind] }, value, path);
  }
  const known = schema.properties ?? {};
  return Object.entries(value).flatMap(([name, part]) =>
    Object.hasOwn(known, name) ? unknownFieldsIn(schemas, known[name], part, inner(name)) : [{ field: inner(name), message: "is not a known field" }]);
}

/** Returns whether the schema takes any JSON object, which is entered as JSON. */
function isFree(schema) {
  return schema.type === "object" && Boolean(schema.additionalProperties);
}
