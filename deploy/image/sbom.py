"""Prints what is installed beside this Python as a bill of materials: CycloneDX 1.6, JSON.

For the image: the packages themselves tell what its layers hold, not the list they were installed from.
"""

import json
import re
from importlib.metadata import Distribution, distributions


def bill() -> dict[str, object]:
    """The bill, components by their names."""
    found = sorted((component(each) for each in distributions()), key=lambda each: str(each["name"]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": next(each for each in found if each["name"] == "cellgate")},
        "components": [each for each in found if each["name"] != "cellgate"],
    }


def component(package: Distribution) -> dict[str, object]:
    """A package, with the licence that it declares."""
    name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
    made: dict[str, object] = {
        "type": "library",
        "name": name,
        "version": package.version,
        "purl": f"pkg:pypi/{name}@{package.version}",
    }
    if expression := package.metadata.get("License-Expression"):
        made["licenses"] = [{"expression": expression}]
    return made


if __name__ == "__main__":
    print(json.dumps(bill(), indent=1))
