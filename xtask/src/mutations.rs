//! Do the checks bite? Each mutation takes out one thing that the design rests on, in a copy of the tree, and what is named
//! beside it must fail then: the chaos of the simulator, or a test. A mutation that nobody notices is an error.
//!
//! It is no part of CI: each mutation is a build, in the profile of the tests. `docs/chaos.md` has what came of the last run.

use crate::shell;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Seeds of chaos within which a mutation must be found.
const SEEDS: &str = "2000";

/// What must notice a mutation.
enum Found {
    /// Chaos in the simulator.
    Chaos,
    /// Tests: their package, which of its test programs (`--lib` or `--test=NAME`), and a part of their names.
    Test(&'static str, &'static str, &'static str),
}

/// One thing that is taken out.
struct Mutation {
    name: &'static str,
    file: &'static str,
    /// What is there, once, and what is put in its place.
    from: &'static str,
    to: &'static str,
    found: Found,
}

/// Which mutations.
#[derive(clap::Args)]
pub struct Args {
    /// Only those whose names have this in them; may be given more than once.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
}

const MUTATIONS: [Mutation; 21] = [
    Mutation {
        name: "a request that ends keeps its booking",
        file: "crates/router/src/router/legs.rs",
        from: "        self.release(id);\n        self.timers.clear(Timer::Request(id));",
        to: "        self.timers.clear(Timer::Request(id));",
        found: Found::Chaos,
    },
    Mutation {
        name: "late answers of earlier attempts count",
        file: "crates/router/src/router/legs.rs",
        from: "(leg.leg == expected && request.attempt == leg.attempt).then_some(placed)",
        to: "(leg.leg == expected).then_some(placed)",
        // Chaos draws them too rarely.
        found: Found::Test(
            "homing-router",
            "--test=chaos",
            "every_request_ends_once_and_nothing_stays",
        ),
    },
    Mutation {
        name: "KV events of a past life count",
        file: "crates/router/src/router/workers.rs",
        from: "        if self.meet(worker, batch.epoch) == Life::Past {\n            return;\n        }\n",
        to: "",
        found: Found::Chaos,
    },
    Mutation {
        name: "a new life keeps what was known of the old cache",
        file: "crates/router/src/router/workers.rs",
        from: "            self.clear_feed_timers(worker);\n            self.forget_cache(worker);\n            self.lose(worker);\n            self.announce(worker);",
        to: "            self.clear_feed_timers(worker);\n            self.lose(worker);\n            self.announce(worker);",
        found: Found::Chaos,
    },
    Mutation {
        name: "the legs of a lost worker are not given up",
        file: "crates/router/src/router/workers.rs",
        from: "            Probe::Died => self.lose(worker),\n",
        to: "            Probe::Died => {}\n",
        found: Found::Test(
            "homing-router",
            "--test=behaviour",
            "when_one_side_fails_the_other_is_cancelled_at_once",
        ),
    },
    Mutation {
        name: "batches of KV events are applied out of order",
        file: "crates/router/src/feed.rs",
        from: "            Next::Sequence(next) => next,\n            Next::Any => sequence,",
        to: "            Next::Sequence(_) | Next::Any => sequence,",
        found: Found::Chaos,
    },
    Mutation {
        name: "a client's end does not end its legs",
        file: "crates/router/src/handoff.rs",
        from: "        Signal::ClientGone => Cancels::Decode.then(Next::Drop),",
        to: "        Signal::ClientGone => then(Next::Drop),",
        found: Found::Chaos,
    },
    Mutation {
        name: "a stream begins again from its start",
        file: "crates/sim/src/client.rs",
        from: "        if self.received == 0 {\n            return Resume::Start;\n        }",
        to: "        if self.received != u32::MAX {\n            return Resume::Start;\n        }",
        found: Found::Chaos,
    },
    Mutation {
        name: "exported blocks are freed before the acknowledgement",
        file: "crates/engine/src/transfers.rs",
        from: "        self.exports.insert(id, held);",
        to: "        self.release(&blocks);\n        self.exports.insert(id, Held { blocks: Vec::new(), ..held });",
        found: Found::Chaos,
    },
    Mutation {
        name: "blocks of an import that was given up are free at once",
        file: "crates/engine/src/transfers.rs",
        from: "        self.fenced.insert(id, written);\n",
        to: "        self.release(&written);\n        self.fenced.insert(id, Vec::new());\n",
        found: Found::Chaos,
    },
    Mutation {
        name: "no budget for pending seeds",
        file: "crates/router/src/admission.rs",
        from: "self.seeds >= limits.seeds_per_decode",
        to: "self.seeds == u32::MAX",
        found: Found::Test(
            "homing-router",
            "--test=behaviour",
            "seeds_above_a_decode_workers_budget_wait_in_the_router",
        ),
    },
    Mutation {
        name: "pauses without jitter",
        file: "crates/router/src/backoff.rs",
        from: "Duration::from_nanos(rng.random_range(base..top)).min(self.cap)",
        to: "Duration::from_nanos(top.min(base * 2).max(rng.random_range(base..base + 1))).min(self.cap)",
        found: Found::Test("homing-router", "--lib", "pauses_stay_between_base_and_cap_and_differ"),
    },
    Mutation {
        name: "boilerplate counts as a family's own",
        file: "crates/kv/src/index.rs",
        from: "            1.0 / self.owners.len() as f64",
        to: "            1.0",
        found: Found::Test("homing-kv", "--test=index", "only_what_the_family_owns_pulls"),
    },
    Mutation {
        name: "boilerplate draws new sessions to where it lies",
        file: "crates/router/src/policies/homing/estimate.rs",
        from: "        if self.turn.new_family {\n            self.turn.prompt_tokens\n        } else {",
        to: "        if self.turn.new_family && place.worker.held_tokens() == 0 {\n            self.turn.prompt_tokens\n        } else {",
        found: Found::Test(
            "homing-router",
            "--test=behaviour",
            "a_worker_that_comes_back_does_not_take_all_that_is_new",
        ),
    },
    Mutation {
        name: "an epoch that is over is taken for a new one",
        file: "crates/router/src/fleet.rs",
        from: "        if self.past_epochs.contains(&epoch) {\n            return Life::Past;\n        }\n",
        to: "",
        found: Found::Test("homing-router", "--lib", "a_late_message_of_an_old_life_is_no_new_life"),
    },
    Mutation {
        name: "a router that asks waits for the step, whatever the admission",
        file: "crates/sim/src/simulation/stack.rs",
        from: "        let Some(admission) = admission.filter(|_| self.router.habits().probes) else {\n            return;\n        };",
        to: "        let admission = admission.unwrap_or_default();",
        found: Found::Test("homing-sim", "--test=simulator", "questions_"),
    },
    Mutation {
        name: "a link that failed is used as if it had not",
        file: "crates/router/src/policies/board.rs",
        from: "self.failures > 0 || (self.on_trial && self.transfers > 0)",
        to: "self.failures == u32::MAX",
        found: Found::Test(
            "homing-router",
            "--lib",
            "a_doubtful_link_is_left_alone_while_another_will_do",
        ),
    },
    Mutation {
        name: "what a worker holds for nobody is not let go of",
        file: "crates/gateway/src/fleet.rs",
        from: "(member.spec.kind == EngineKind::Homing).then(|| member.uri(\"/homing/release\"))",
        to: "(member.spec.kind != EngineKind::Homing).then(|| member.uri(\"/homing/release\"))",
        found: Found::Test(
            "homing-gateway",
            "--test=gateway",
            "kv_that_nobody_will_pull_is_let_go_of_at_once",
        ),
    },
    Mutation {
        name: "a release is heard whatever life it was meant for",
        file: "crates/worker/src/http/release.rs",
        from: "if asked.epoch != app.info.epoch {",
        to: "if asked.epoch == BootEpoch(u64::MAX) {",
        found: Found::Test(
            "homing-worker",
            "--test=worker",
            "an_export_that_nobody_will_pull_is_released_at_once",
        ),
    },
    Mutation {
        name: "sketches of another life are believed",
        file: "crates/router/src/router/workers.rs",
        from: "        let known = |record: &&Worker| record.info.epoch == report.epoch;\n        let Some(record) = self.fleet.get(report.worker).filter(known) else {\n            return;\n        };\n        // Where",
        to: "        let Some(record) = self.fleet.get(report.worker) else {\n            return;\n        };\n        // Where",
        found: Found::Test(
            "homing-router",
            "--test=behaviour",
            "a_sketch_goes_before_what_was_predicted_earlier",
        ),
    },
    Mutation {
        name: "sketches bring back what was removed since",
        file: "crates/router/src/sketches.rs",
        from: "if report.sequence < asked.since || asked.report",
        to: "if asked.report",
        found: Found::Test(
            "homing-router",
            "--test=behaviour",
            "a_sketch_says_what_a_lost_event_did_not_and_later_events_go_before_it",
        ),
    },
];

/// Tries the mutations; an error names those that nobody noticed or that could not be tried.
pub fn run(args: &Args) -> Result<()> {
    let tree = shell::root().join("target").join("mutations");
    let _gone = shell::succeeds("git", &["worktree", "remove", "--force", &tree.display().to_string()]);
    shell::run(
        "git",
        &["worktree", "add", "--detach", &tree.display().to_string(), "HEAD"],
    )?;
    let wanted = |mutation: &&Mutation| {
        args.only.is_empty() || args.only.iter().any(|text| mutation.name.contains(text.as_str()))
    };
    let mut unnoticed = Vec::new();
    for mutation in MUTATIONS.iter().filter(wanted) {
        let noticed = try_one(&tree, mutation);
        let verdict = match &noticed {
            Ok(true) => "found",
            Ok(false) => "MISSED",
            Err(_) => "UNKNOWN",
        };
        println!("{verdict} {}: {}", mutation.name, mutation.found.describe());
        // One that cannot be tried keeps the others from nothing.
        if let Err(error) = &noticed {
            println!("    {error:#}");
        }
        if !noticed.unwrap_or(false) {
            unnoticed.push(mutation.name);
        }
    }
    shell::run("git", &["worktree", "remove", "--force", &tree.display().to_string()])?;
    ensure!(unnoticed.is_empty(), "nobody noticed: {}", unnoticed.join(", "));
    Ok(())
}

/// Whether what is named beside a mutation notices it.
fn try_one(tree: &Path, mutation: &Mutation) -> Result<bool> {
    let file = tree.join(mutation.file);
    let whole = fs::read_to_string(&file)?;
    ensure!(
        whole.matches(mutation.from).count() == 1,
        "`{}` has not just once what is to be taken out",
        mutation.file
    );
    fs::write(&file, whole.replacen(mutation.from, mutation.to, 1))?;
    let noticed = mutation.found.notices(tree);
    fs::write(&file, whole)?;
    noticed
}

impl Found {
    fn describe(&self) -> String {
        match self {
            Self::Chaos => format!("chaos within {SEEDS} seeds"),
            Self::Test(package, program, test) => format!("`cargo test -p {package} {program} {test}`"),
        }
    }

    /// What builds it, and what runs it.
    fn commands(&self) -> [Vec<&'static str>; 2] {
        match self {
            Self::Chaos => {
                let which = ["--package", "homing-sim", "--bin", "homing-chaos"];
                let run = [&["run"][..], &which, &["--", SEEDS]];
                [[&["build"][..], &which].concat(), run.concat()]
            }
            Self::Test(package, program, test) => [
                vec!["test", "--no-run", "--package", package, program],
                vec!["test", "--package", package, program, test],
            ],
        }
    }

    /// Whether it fails. What does not compile is no answer, and neither is a name that no test has.
    fn notices(&self, tree: &Path) -> Result<bool> {
        let [build, run] = self.commands();
        ensure!(cargo(tree, &build, Stdio::inherit())?.0, "it does not compile");
        let (passes, printed) = cargo(tree, &run, Stdio::null())?;
        let is_test = matches!(self, Self::Test(..));
        let ran = |line: &str| line.starts_with("test result:") && !line.contains(" 0 passed; 0 failed");
        ensure!(
            !is_test || printed.lines().any(ran),
            "{} runs no test, expected at least one",
            self.describe()
        );
        Ok(!passes)
    }
}

/// Whether it ends well, and what it prints.
fn cargo(tree: &Path, arguments: &[&str], errors: Stdio) -> Result<(bool, String)> {
    let output = Command::new("cargo")
        .arg("--quiet")
        .args(arguments)
        .current_dir(tree)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(errors)
        .output()
        .context("`cargo` could not be started")?;
    Ok((
        output.status.success(),
        String::from_utf8_lossy(&output.stdout).into_owned(),
    ))
}
