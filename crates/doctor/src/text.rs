//! A diagnosis in words, for people, and the catalogue of modes as Markdown for the documentation.

use crate::finding::{Finding, Level};
use crate::mode::{Mode, ModeId, Severity};
use std::fmt::Write as _;

/// Lines of evidence that are shown of a finding.
const EVIDENCE_SHOWN: usize = 6;

/// What was found, the worst first: for each finding its cost, its evidence, the five fields and the setting to change. What is
/// only information has one line.
#[must_use]
pub fn diagnosis(findings: &[Finding]) -> String {
    let mut text = String::new();
    let (loud, quiet): (Vec<_>, Vec<_>) = findings.iter().partition(|finding| finding.level > Level::Info);
    if loud.is_empty() {
        text.push_str("nothing is wrong\n");
    }
    for (number, finding) in (1..).zip(&loud) {
        push_finding(&mut text, number, finding);
    }
    for finding in quiet {
        let _ = writeln!(text, "info: {}: {}", finding.mode, finding.seen);
    }
    text
}

fn push_finding(text: &mut String, number: usize, finding: &Finding) {
    let mode = finding.mode.mode();
    let part = finding
        .part_of
        .map_or_else(String::new, |whole| format!(", part of `{whole}`"));
    let seed = finding.seed.map_or_else(String::new, |seed| format!(", seed {seed}"));
    let _ = writeln!(
        text,
        "{number}. {}: {} ({}{part}{seed})",
        finding.level.as_str(),
        mode.title,
        finding.mode
    );
    let _ = writeln!(
        text,
        "   cost        {} failed requests, {:.1} s of latency",
        finding.cost.failed_requests, finding.cost.latency_s
    );
    let _ = writeln!(text, "   seen        {}", finding.seen);
    for proof in finding.evidence.iter().take(EVIDENCE_SHOWN) {
        let place = match proof.line {
            0 => proof.file.clone(),
            line => format!("{}:{line}", proof.file),
        };
        let _ = writeln!(text, "   evidence    {place}  {}", proof.value);
    }
    for (name, value) in fields(mode) {
        let _ = writeln!(text, "   {name:<11} {value}");
    }
    let _ = writeln!(text, "   change      {}\n", mode.setting);
}

fn fields(mode: &Mode) -> [(&'static str, &str); 5] {
    [
        ("symptom", &mode.symptom),
        ("root cause", &mode.root_cause),
        ("trigger", &mode.trigger),
        ("mitigation", &mode.mitigation),
        ("fix", &mode.fix),
    ]
}

/// All modes as Markdown: a table, then a section each, which ends with what `more` says of it.
#[must_use]
pub fn catalogue_markdown(more: impl Fn(ModeId) -> String) -> String {
    let mut text = String::from("| mode | what | severity | part of |\n| --- | --- | --- | --- |\n");
    for id in ModeId::ALL {
        let mode = id.mode();
        let _ = writeln!(
            text,
            "| [`{id}`](#{id}) | {} | {} | {} |",
            titled(mode),
            severity(mode.severity),
            mode.parent.map_or_else(String::new, |parent| format!("`{parent}`"))
        );
    }
    for id in ModeId::ALL {
        push_section(&mut text, *id);
        text.push_str(&more(*id));
    }
    text
}

fn push_section(text: &mut String, id: ModeId) {
    let mode = id.mode();
    let _ = writeln!(
        text,
        "\n## {id}\n\n{}. Severity: {}.\n",
        titled(mode),
        severity(mode.severity)
    );
    let _ = writeln!(text, "| | |\n| --- | --- |");
    for (name, value) in fields(mode) {
        let _ = writeln!(text, "| {name} | {value} |");
    }
    let _ = writeln!(text, "| the one setting | {} |", mode.setting);
    let _ = writeln!(text, "| where to look | {} |", mode.where_to_look.join("<br>"));
    let _ = writeln!(text, "| described in | {} |", mode.sources.join("<br>"));
}

fn titled(mode: &Mode) -> String {
    match &mode.letter {
        Some(letter) => format!("{letter}: {}", mode.title),
        None => mode.title.clone(),
    }
}

const fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Info => "info",
        Severity::Moderate => "moderate",
        Severity::Major => "major",
        Severity::Critical => "critical",
    }
}
