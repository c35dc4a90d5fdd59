"""Frame and looks of the HTML report, for light and dark screens and for paper."""

from __future__ import annotations

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --card: #f6f8fa; --ink: #22272e; --muted: #646d79;
  --rule: #d9dee4; --good: #2f7d3a; --c0: #2a7f9e; --c1: #c8553d; --c2: #5b8c3a; --c3: #b0457b; --c4: #6457a6;
  --c5: #d98324; --c6: #3f9b86; --c7: #8a6d3b; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181d; --card: #1c2229; --ink: #e3e7ec; --muted: #9aa4b0;
  --rule: #343c46; --good: #7fc98a; --c0: #5fb6d6; --c1: #ea8a72; --c2: #94c46f; --c3: #df82b2; --c4: #a499e6;
  --c5: #eda758; --c6: #74cdb8; --c7: #c2a570; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 1240px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .8rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 .6rem; }
h3 { font-size: 1rem; margin: 0; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .9rem 1rem;
  margin: 0 0 1rem; break-inside: avoid; }
details > summary { cursor: pointer; font-weight: 600; }
body > details { margin: 0 0 1rem; } body > details > summary { font-size: 1.2rem; margin-bottom: .6rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem; }
figure { margin: 0; min-width: 0; }
svg { display: block; width: 100%; max-width: 820px; height: auto; }
svg text { fill: var(--muted); font: 11px system-ui, sans-serif; }
svg polyline { fill: none; stroke-width: 1.6; } svg .band { opacity: .18; }
.grid { stroke: var(--rule); stroke-width: 1; } .axis { stroke: var(--muted); }
.mean { stroke: var(--ink); stroke-width: 1.3; stroke-dasharray: 5 4; }
.pictures img { width: 100%; background: #fff; border-radius: 4px; padding: 4px; }
.legend { margin: .2rem 0; color: var(--muted); font-size: .85rem; }
.legend span { white-space: nowrap; margin-right: .9rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
.legend .fmean { background: var(--ink); height: 2px; vertical-align: middle; }
.scale { width: 140px; height: .8em; vertical-align: middle; image-rendering: pixelated; }
.wide { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .88rem; margin-top: .4rem; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
thead th { color: var(--muted); font-weight: 600; }
td:nth-child(-n+4) { white-space: nowrap; font-variant-numeric: tabular-nums; }
.facts th { color: var(--muted); font-weight: 500; white-space: nowrap; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: .82rem; }
.none { color: var(--muted); font-style: italic; } .good { color: var(--good); }
""" + "\n".join(
    f".f{index} {{ fill: var(--c{index}); background: var(--c{index}); }} .s{index} {{ stroke: var(--c{index}); }}"
    for index in range(8)
)

# The icon keeps browsers from asking for one.
PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$TITLE: run report</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head>
<body><h1>$TITLE</h1>
$BODY
</body></html>
"""
