//! `homing drill`: shows a failure mode with its fix off, and its absence with the fix on.

use crate::doctor_args as args;
use crate::failure::Usage;
use crate::output::{self, OutFolder, print, say};
use anyhow::{Context, Result, bail};
use homing_doctor::{Level, ModeId};
use homing_drills::{Drill, Scenario, drill, scenarios};
use serde::Serialize;
use std::fmt::Write as _;
use std::time::Instant;

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'d> {
    schema: &'static str,
    holds: bool,
    drills: &'d [Drill],
}

/// Lists the drills, or runs one or all of them.
pub fn run(args: &args::Drill) -> Result<()> {
    if args.what == "list" {
        return print(&if args.json { list_json() } else { list() });
    }
    let chosen = chosen(&args.what)?;
    output::clean_up_when_interrupted()?;
    let out = args
        .out
        .as_deref()
        .map(|out| OutFolder::create("--out", out))
        .transpose()?;
    let mut drills = Vec::new();
    for scenario in chosen {
        let began = Instant::now();
        let done =
            drill(scenario, args.seed).with_context(|| format!("drill `{}`, seed `{}`", scenario.mode, args.seed))?;
        say(format_args!(
            "{}: {} in {:.1} s",
            scenario.mode,
            if done.holds { "holds" } else { "does not hold" },
            began.elapsed().as_secs_f64()
        ));
        drills.push(done);
    }
    if let Some(out) = out {
        keep(out, &drills)?;
    }
    let holds = drills.iter().all(|drill| drill.holds);
    let document = Document {
        schema: "homing.drills/1",
        holds,
        drills: &drills,
    };
    print(&if args.json {
        format!(
            "{}\n",
            serde_json::to_string(&document).context("the drills are no JSON")?
        )
    } else if let [one] = drills.as_slice() {
        details(one)
    } else {
        table(&drills)
    })?;
    let failed: Vec<&str> = drills
        .iter()
        .filter(|drill| !drill.holds)
        .map(|drill| drill.mode.as_str())
        .collect();
    if !failed.is_empty() {
        bail!(
            "{} of {} drills do not hold: {}",
            failed.len(),
            drills.len(),
            failed.join(", ")
        );
    }
    Ok(())
}

fn chosen(what: &str) -> Result<Vec<&'static Scenario>> {
    if what == "all" {
        return Ok(scenarios().iter().collect());
    }
    let found = ModeId::from_name(what).and_then(homing_drills::scenario);
    found.map(|scenario| vec![scenario]).ok_or_else(|| {
        let known: Vec<&str> = scenarios().iter().map(|scenario| scenario.mode.as_str()).collect();
        Usage::error(format_args!(
            "no drill `{what}`, expected `list`, `all` or one of {}",
            known.join(", ")
        ))
    })
}

/// A folder a drill and setting, each as `homing sim --out` writes it.
fn keep(out: OutFolder, drills: &[Drill]) -> Result<()> {
    for drill in drills {
        for (setting, files) in &drill.files {
            for (name, text) in files {
                out.write(&format!("{}/{setting}/{name}", drill.mode), text.as_bytes())?;
            }
        }
    }
    out.keep()
}

fn list() -> String {
    let mut text = String::new();
    for scenario in scenarios() {
        let mode = scenario.mode.mode();
        let letter = mode
            .letter
            .as_deref()
            .map_or_else(String::new, |letter| format!("{letter}: "));
        let _ = writeln!(text, "{:<20} {letter}{}", scenario.mode.as_str(), mode.title);
    }
    text
}

fn list_json() -> String {
    #[derive(Serialize)]
    struct Listed {
        mode: ModeId,
        title: &'static str,
        story: &'static str,
    }
    let listed: Vec<Listed> = scenarios()
        .iter()
        .map(|scenario| Listed {
            mode: scenario.mode,
            title: &scenario.mode.mode().title,
            story: &scenario.story,
        })
        .collect();
    format!("{}\n", serde_json::to_string(&listed).expect("names and texts"))
}

/// One line a drill: what failed in each setting, what the doctor named first, and whether all of it holds.
fn table(drills: &[Drill]) -> String {
    let mut text = format!(
        "{:<20} {:>14} {:>14} {:>14}  {:<20} {}\n",
        "failure mode", "failed, off", "mitigation", "on", "the doctor says", "holds"
    );
    for drill in drills {
        let failed = |name: &str| {
            let setting = drill.settings.iter().find(|setting| setting.name == name);
            setting.map_or_else(
                || "-".to_owned(),
                |setting| format!("{}/{}", setting.failed, setting.requests),
            )
        };
        let off = drill.settings.iter().find(|setting| setting.name == "off");
        let first = off.and_then(|off| off.findings.first());
        let _ = writeln!(
            text,
            "{:<20} {:>14} {:>14} {:>14}  {:<20} {}",
            drill.mode.as_str(),
            failed("off"),
            failed("mitigation"),
            failed("on"),
            first.map_or("nothing", |finding| finding.mode.as_str()),
            if drill.holds { "yes" } else { "NO" }
        );
        for wrong in wrong(drill) {
            let _ = writeln!(text, "    {wrong}");
        }
    }
    text
}

/// What of a drill does not hold.
fn wrong(drill: &Drill) -> impl Iterator<Item = String> + '_ {
    let statements = drill.statements.iter().filter(|statement| !statement.holds);
    let statements = statements.map(|statement| {
        format!(
            "{} ({} against {})",
            statement.statement, statement.left, statement.right
        )
    });
    statements.chain(drill.wrong_findings.iter().cloned())
}

/// Everything about one drill.
fn details(drill: &Drill) -> String {
    let mode = drill.mode.mode();
    let mut text = format!("{} ({}), seed {}\n", mode.title, drill.mode, drill.seed);
    if let Some(scenario) = homing_drills::scenario(drill.mode) {
        let _ = writeln!(text, "{}", scenario.story);
    }
    for setting in &drill.settings {
        let about = setting
            .about
            .as_deref()
            .map_or_else(String::new, |about| format!(": {about}"));
        let p99 = setting
            .latency_p99_s
            .map_or_else(|| "-".to_owned(), |p99| format!("{p99:.2} s"));
        let _ = writeln!(
            text,
            "\n{}{about}\n  {} with {}\n  {} of {} requests failed, latency p99 {p99}",
            setting.name, setting.cluster, setting.policy, setting.failed, setting.requests
        );
        for finding in setting.findings.iter().filter(|finding| finding.level > Level::Info) {
            let _ = writeln!(
                text,
                "  doctor: {} {}: {}",
                finding.level.as_str(),
                finding.mode,
                finding.seen
            );
        }
    }
    text.push('\n');
    for statement in &drill.statements {
        let holds = if statement.holds { "holds" } else { "DOES NOT HOLD" };
        let _ = writeln!(
            text,
            "{holds}: {} ({} against {})",
            statement.statement, statement.left, statement.right
        );
    }
    for wrong in &drill.wrong_findings {
        let _ = writeln!(text, "DOES NOT HOLD: {wrong}");
    }
    let _ = writeln!(
        text,
        "{}",
        if drill.holds {
            "the drill holds"
        } else {
            "the drill does not hold"
        }
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_or_the_known_ones_are_listed() {
        assert_eq!(chosen("all").expect("all of them").len(), scenarios().len());
        assert_eq!(chosen("cascade").expect("one").len(), 1);
        let error = chosen("cascad").expect_err("no such drill").to_string();
        assert!(
            error.contains("no drill `cascad`, expected `list`, `all` or one of cascade"),
            "{error}"
        );
        assert!(list().starts_with("cascade              A: "), "{}", list());
    }
}
