/**
 * A form generated from a JSON schema of the API's document, with a field for every field of the schema.
 *
 *   const form = makeForm(document, "TuningSubmission", {suggestions: {device: ["cpu"]}})
 *   parent.append(form.field("effective_batch_size"), form.field("spec.model"))   nodes, by dotted path
 *   form.rest("spec")             the fields of an object that no call has taken yet
 *   form.read()                   {value, problems}; fields left at their defaults are omitted
 *   form.write(value)             fills it in
 *   form.unknownFields(value)     problems: parts of a value without a field, which `write` leaves out
 *   form.place(problems)          shows messages beside their fields; returns the problems without a field
 *
 * A problem is {field: dotted path, message}, as the service sends them.
 */

import { h, replace } from "./dom.js";

const UNITS = { "": 1, b: 1, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12 };
const NUMBER = /^[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const SIZE = /^([\d.]+)\s*([kmgt]?i?b?)$/i;

/** A form over the schema `name` of an OpenAPI document. */
export function makeForm(document, name, { suggestions = {} } = {}) {
  const schemas = document.components.schemas;
  const taken = new Map();
  const context = { schemas, suggestions };

  function take(path) {
    const { schema, required } = schemaAt(schemas, schemas[name], path);
    const field = makeField(context, schema, { path, required });
    taken.set(path, field);
    return field.element;
  }

  return {
    field: take,
    rest(path, except = []) {
      const { schema } = path === "" ? { schema: schemas[name] } : schemaAt(schemas, schemas[name], path);
      const paths = Object.keys(resolved(schemas, schema).properties).map((child) => (path === "" ? child : `${path}.${child}`));
      return paths.filter((child) => !except.includes(child) && ![...taken.keys()].some((known) => known === child || known.startsWith(`${child}.`))).map(take);
    },
    read() {
      const problems = [];
      const value = {};
      for (const [path, field] of taken) {
        put(value, path, field.read(problems));
      }
      return { value, problems };
    },
    write(value) {
      taken.forEach((field, path) => field.write(at(value, path)));
    },
    unknownFields: (value) => unknownFieldsIn(schemas, schemas[name], value, ""),
    place(problems) {
      const nodes = [...taken.values()].flatMap((field) => [field.element, ...field.element.querySelectorAll("[data-path]")]);
      nodes.forEach((node) => setError(node, ""));
      return problems.filter((problem) => !placed(nodes, problem));
    },
  };
}

// --- kinds of fields ------------------------------------------------------------------------------------------------

function makeField(context, given, { path, required }) {
  const schema = resolved(context.schemas, given);
  const options = { context, schema, path, required, label: labelOf(path), hint: given.description ?? schema.description ?? "" };
  if (schema.discriminator) {
    return union(options);
  }
  if (schema.type === "object" && schema.properties && !isFree(schema)) {
    return group(options);
  }
  if (schema.type === "boolean") {
    return checkbox(options);
  }
  if (schema.enum) {
    return choice(options);
  }
  return textField(options, writerOf(schema, path));
}

/** An object: its fields below one another. */
function group({ context, schema, path, label, hint }) {
  const fields = childrenOf(context, schema, path);
  const element = h("fieldset", { class: "group", dataset: { path } }, h("legend", {}, label), hintNode(hint), Object.values(fields).map((field) => field.element), errorNode(path));
  return { element, read: (problems) => readAll(fields, problems), write: (value) => writeAll(fields, value) };
}

/** One of several kinds of object: a select, and the fields of the selected kind. */
function union({ context, schema, path, required, label, hint }) {
  const { propertyName, mapping } = schema.discriminator;
  const kinds = kindsOf(schema);
  const place = h("div", { class: "group-fields" });
  let fields = {};
  const id = idOf(path, propertyName);
  const select = h("select", { id, class: "input", on: { change: () => open(select.value) } }, !required && h("option", { value: "" }, "none"), kinds.map((kind) => h("option", { value: kind }, kind)));

  function open(kind) {
    select.value = kind;
    fields = kind === "" ? {} : childrenOf(context, resolved(context.schemas, { $ref: mapping[kind] }), path, propertyName);
    replace(place, Object.values(fields).map((field) => field.element));
  }
  open(required ? kinds[0] : "");
  const element = h("fieldset", { class: "group", dataset: { path } },
    h("legend", {}, label), hintNode(hint),
    h("div", { class: "field" }, h("label", { for: id }, labelOf(propertyName)), select), place, errorNode(path));
  return {
    element,
    read: (problems) => (select.value === "" ? undefined : { [propertyName]: select.value, ...readAll(fields, problems) }),
    write(value) {
      open(kinds.includes(value?.[propertyName]) ? value[propertyName] : required ? kinds[0] : "");
      writeAll(fields, value);
    },
  };
}

function checkbox({ schema, path, required, label, hint }) {
  const id = idOf(path);
  const defaultValue = schema.default ?? false;
  const input = h("input", { id, type: "checkbox", checked: defaultValue, "aria-describedby": `${id}-hint ${id}-error` });
  const element = h("div", { class: "field", dataset: { path } },
    h("div", { class: "choice" }, input, h("label", { for: id }, label)), hintNode(hint, id), errorNode(path));
  return {
    element,
    read: () => (input.checked === defaultValue && !required ? undefined : input.checked),
    write: (value) => (input.checked = value ?? defaultValue),
  };
}

function choice({ schema, path, required, label, hint }) {
  const id = idOf(path);
  const defaultValue = schema.default ?? (required ? schema.enum[0] : "");
  const values = [...(required || schema.default !== undefined ? [] : [""]), ...schema.enum];
  const input = h("select", { id, class: "input", "aria-describedby": `${id}-hint ${id}-error` }, values.map((value) => h("option", { value, selected: value === defaultValue }, value || "none")));
  const element = h("div", { class: "field", dataset: { path } }, h("label", { for: id }, label), input, hintNode(hint, id), errorNode(path));
  return {
    element,
    read: () => (input.value === defaultValue && !required ? undefined : input.value),
    write: (value) => (input.value = value ?? defaultValue),
  };
}

/** A text field; `writer` converts its text into a value and back. */
function textField({ context, schema, path, required, label, hint }, writer) {
  const id = idOf(path);
  const known = context.suggestions[path] ?? [];
  const attributes = {
    id, class: `input ${writer.lines ? "mono" : ""}`, placeholder: placeholderOf(schema, writer), autocomplete: "off", spellcheck: "false",
    inputmode: writer.inputMode, "aria-required": required ? "true" : null, "aria-describedby": `${id}-hint ${id}-error`,
    list: known.length > 0 ? `${id}-known` : null,
  };
  const input = writer.lines ? h("textarea", { ...attributes, rows: writer.lines }) : h("input", { ...attributes, type: "text" });
  const element = h("div", { class: "field", dataset: { path } },
    h("label", { for: id }, label, required && h("span", { class: "muted" }, " (required)")), input,
    known.length > 0 && h("datalist", { id: `${id}-known` }, known.map((value) => h("option", { value }))),
    hintNode([hint, writer.hint].filter(Boolean).join(" "), id), errorNode(path));
  return {
    element,
    read(problems) {
      if (input.value.trim() === "") {
        return undefined;
      }
      try {
        return writer.parse(input.value.trim());
      } catch (error) {
        problems.push({ field: path, message: error.message });
        return undefined;
      }
    },
    write: (value) => (input.value = value === undefined || value === null ? "" : writer.format(value)),
  };
}

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
  if (path.endsWith("_bytes")) {
    return { parse: asBytes, format: String, hint: "For example 24 GiB." };
  }
  if (schema.type === "integer" || schema.type === "number") {
    return { parse: asNumber, format: String, inputMode: schema.type === "integer" ? "numeric" : "decimal" };
  }
  return { parse: (text) => text, format: String };
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
    throw new Error(`"${text}" is not a size: write for example 24 GiB, or a number of bytes`);
  }
  return Math.round(Number(figure) * factor);
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
  return some?.length === 1 ? { ...schema, anyOf: undefined, ...resolved(schemas, some[0]) } : schema;
}

/** The kinds of a union, in the order of its alternatives. */
function kindsOf({ oneOf, discriminator: { mapping } }) {
  const place = (kind) => oneOf.findIndex((option) => option.$ref === mapping[kind]);
  return Object.keys(mapping).toSorted((one, other) => place(one) - place(other));
}

function schemaAt(schemas, root, path) {
  let schema = root;
  let required = true;
  for (const name of path.split(".")) {
    const parent = resolved(schemas, schema);
    schema = parent.properties[name];
    required = (parent.required ?? []).includes(name);
  }
  return { schema, required };
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

function childrenOf(context, schema, path, without = null) {
  const names = Object.keys(schema.properties).filter((name) => name !== without && schema.properties[name].const === undefined);
  return Object.fromEntries(names.map((name) => [name, makeField(context, schema.properties[name], { path: `${path}.${name}`, required: (schema.required ?? []).includes(name) })]));
}

function readAll(fields, problems) {
  const found = Object.entries(fields).map(([name, field]) => [name, field.read(problems)]).filter(([, value]) => value !== undefined);
  return found.length === 0 ? undefined : Object.fromEntries(found);
}

function writeAll(fields, value) {
  Object.entries(fields).forEach(([name, field]) => field.write(value?.[name]));
}

function put(target, path, value) {
  if (value === undefined) {
    return;
  }
  const names = path.split(".");
  const last = names.pop();
  const owner = names.reduce((inner, name) => (inner[name] ??= {}), target);
  owner[last] = value;
}

function at(value, path) {
  return path.split(".").reduce((inner, name) => inner?.[name], value);
}

// --- texts ----------------------------------------------------------------------------------------------------------

function labelOf(path) {
  const name = path.split(".").at(-1).replaceAll("_", " ");
  return name.charAt(0).toUpperCase() + name.slice(1).replace(/ bytes$/, "");
}

function placeholderOf(schema, writer) {
  if (schema.default !== undefined && schema.default !== null) {
    return writer.format(schema.default);
  }
  return schema.properties?.model_type ? '{"model_type": "gpt2"}' : "";
}

function hintNode(text, id = null) {
  const node = h("p", { class: "field-hint", id: id && `${id}-hint` });
  text.split("`").forEach((part, index) => node.append(index % 2 === 0 ? part : h("code", {}, part)));
  return node;
}

function errorNode(path) {
  return h("p", { class: "field-error", id: `${idOf(path)}-error`, hidden: true });
}

function idOf(path, more = "") {
  return `field-${path.replaceAll(".", "-")}${more && `-${more}`}`;
}

/** Shows a problem beside its field, or beside the nearest enclosing field. */
function placed(nodes, problem) {
  const fits = nodes.filter((node) => problem.field === node.dataset.path || problem.field.startsWith(`${node.dataset.path}.`));
  const nearest = fits.toSorted((one, other) => other.dataset.path.length - one.dataset.path.length)[0];
  if (nearest === undefined) {
    return false;
  }
  const inner = problem.field.slice(nearest.dataset.path.length + 1);
  setError(nearest, `${inner && `${inner}: `}${problem.message}`);
  nearest.closest("details")?.setAttribute("open", "");
  return true;
}

function setError(node, message) {
  const error = [...node.children].find((child) => child.classList.contains("field-error"));
  const input = node.querySelector(".input, input");
  const text = message && error.textContent ? `${error.textContent} ${message}` : message;
  error.textContent = text;
  error.hidden = text === "";
  if (node.tagName !== "FIELDSET" && input !== null) {
    input.toggleAttribute("aria-invalid", false);
    if (text !== "") {
      input.setAttribute("aria-invalid", "true");
      input.setAttribute("aria-errormessage", error.id);
    }
  }
}
