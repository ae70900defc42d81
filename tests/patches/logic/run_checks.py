"""Runs checks inside an engine's interpreter, which has no test runner: `run_checks.py REPORT MODULE...`.

Every function `check_*` of the modules runs once; REPORT becomes {"module.check": traceback or null}. Importing the
engine takes ten seconds, so all checks of one engine share a process; each undoes what it replaces.
"""

import importlib
import json
import sys
import traceback


def main():
    report, names = sys.argv[1], sys.argv[2:]
    results = {}
    for name in names:
        try:
            module = importlib.import_module(name)
        except BaseException:
            results[f"{name}.import"] = traceback.format_exc()
            continue
        results[f"{name}.import"] = None
        for check, function in vars(module).items():
            if check.startswith("check_"):
                try:
                    function()
                    results[f"{name}.{check}"] = None
                except BaseException:
                    results[f"{name}.{check}"] = traceback.format_exc()
    with open(report, "w", encoding="utf-8") as out:
        json.dump(results, out)


main()
