"""Reports, shared by ``conch perf``, ``conch analyze``, ``conch convert`` and ``conch doctor``.

A command builds a :class:`~conch.measure.reports.report.Report`, which is data: sections of text, tables with typed
columns, and charts. There is one renderer for each output: ``html`` writes one file that needs no network and can be
printed, ``terminal`` prints parts of a report in the width of the terminal, and ``text`` has Markdown and CSV.
``files`` checks the paths of reports before the work that they report begins.

``report``, ``numbers`` and ``text`` need only the standard library, ``terminal`` needs rich; ``charts`` and ``html``
load altair and vl-convert (extra ``report``) when they are called. Charts that are not ``wide`` are shown two in a row.
"""
