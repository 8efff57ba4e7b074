"""Reports, shared by ``conch perf``, ``conch analyze``, ``conch convert`` and ``conch doctor``.

A command builds a :class:`~conch.measure.reports.report.Report`, which is data: sections of text, tables with typed
columns, and charts. There is one renderer for each output: ``html`` writes one file that needs no network and can be
printed, ``terminal`` prints parts of a report in the width of the terminal, and ``text`` has Markdown and CSV. ::

    from conch.measure.reports.charts import Axis, Dot, Series, line_chart
    from conch.measure.reports.files import check_reports, write_report
    from conch.measure.reports.numbers import milliseconds, significant
    from conch.measure.reports.report import Column, Note, Properties, Report, Row, Section, Table
    from conch.measure.reports.terminal import show

    check_reports({"--html": path})           # before the work: checks the extra and the path
    table = Table(
        "By concurrency",
        [Column("concurrency", number=True), Column("infer/s", number=True, format=significant)],
        [Row([1, 20.0993]), Row([64, 71.944], tone="good")],
    )
    report = Report(
        title="resnet, measured",
        lead="71.9 inferences a second with p99 at 1.41 s.",
        sections=[
            Section("Machine", [Properties([("processor", "AMD EPYC"), ("cores", "2")])]),
            Section(
                "Load",
                [
                    Note("warning", "Other processes used a third of the processor."),
                    line_chart(
                        "Latency against throughput",
                        [Series("config_7", [Dot(20.1, 49.7, "1 caller"), Dot(71.9, 897, "64 callers")])],
                        Axis("throughput (infer/s)"),
                        Axis("p99 latency (ms)", logarithmic=True),
                        alt="Latency rises from 49.7 ms at 20 infer/s to 897 ms at 72 infer/s.",
                    ),
                    table,
                ],
            ),
        ],
    )
    write_report(report, path)
    show(console, table)

``report``, ``numbers`` and ``text`` need only the standard library, ``terminal`` needs rich; ``charts`` and ``html``
load altair and vl-convert (extra ``report``) when they are called. Charts that are not ``wide`` are shown two in a row.
"""
