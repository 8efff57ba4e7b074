"""Report pages with charts, shared by ``conch perf``, ``conch analyze`` and ``conch convert``.

A page is data (:mod:`conch.measure.reports.page`). :mod:`conch.measure.reports.charts` makes its charts, and
:mod:`conch.measure.reports.numbers` formats its figures. :mod:`conch.measure.reports.writing` writes it as one HTML
file that needs no network and can be printed. ::

    from conch.measure.reports.charts import Axis, Dot, Series, line_chart
    from conch.measure.reports.numbers import milliseconds, significant
    from conch.measure.reports.page import Column, Note, Page, Properties, Row, Section, Table
    from conch.measure.reports.writing import check_reports, write_page

    check_reports({"--html": path})           # before the work: checks the extra and the path
    page = Page(
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
                    Table(
                        "By concurrency",
                        [Column("concurrency", number=True), Column("infer/s", number=True)],
                        [Row(["1", significant(20.0993)]), Row(["64", significant(71.944)], tone="good")],
                    ),
                ],
            ),
        ],
    )
    write_page(page, path)

All texts of a page are escaped when it is written, so names and messages from servers are included unchanged.
``page`` and ``numbers`` need only the standard library; ``charts`` and ``writing`` load altair and vl-convert (extra
``report``) when they are called. Charts that are not ``wide`` are shown two in a row.
"""
