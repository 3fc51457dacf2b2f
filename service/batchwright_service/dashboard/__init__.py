"""The web pages. In the browser they read their data from the public API.

The pipeline of a page:

1. ``routes`` maps an address to a template; ``sign_in`` opens and closes sessions.
2. ``pages`` renders a file of `templates/`: the frame, the visitor and the addresses of static files, no data.
3. ``assets`` serves `static/` (ES modules without a build step, styles) and plotly.js from its package.
4. In the browser the ES module of the page calls the API (`static/api.js`) and renders components with Preact and htm
   (`static/preact-htm.js`, vendored): `static/components.js` has the shared ones, `static/data_table.js` tables,
   `static/list.js` lists of the API, `static/work.js` the frame of a tuning or job, `static/schema_form.js` forms.
   Text is never parsed as HTML.

``error_pages`` shows a problem document as a page where a browser requested one; ``new_tuning`` supplies the schemas of
the forms.

Where a new thing goes: a page, a template, a module in `static/` and a line in ``routes``; a column of a list, its
entry in `static/lists.js`, and the API's document first.

The package may import ``batchwright_service.api``, ``batchwright_service.auth`` and the layers below; it reads no store
and calls no use case.
"""
