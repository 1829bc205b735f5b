//! Scenarios as data: one file a failure mode, compiled in.

use crate::statement::Statement;
use homing_doctor::ModeId;
use serde::Deserialize;
use std::sync::LazyLock;

/// The setting in which nothing is repaired.
pub const OFF: &str = "off";
/// The setting with what the papers did about it, where they did something.
pub const MITIGATION: &str = "mitigation";
/// The setting in which it is repaired.
pub const ON: &str = "on";

/// A drill's scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The mode that it shows.
    pub mode: ModeId,
    /// What happens, in a sentence or two.
    pub story: String,
    /// What is the same in all settings, unless one says otherwise.
    pub load: Load,
    /// The settings: `off` and `on`, mostly `mitigation`, and those that show side effects or what is compared with.
    pub setting: Vec<Setting>,
    /// What must hold, such as `off.failed_share >= 0.5`.
    pub holds: Vec<Statement>,
}

/// What is sent, and what goes wrong on purpose.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// A generator with its parameters.
    pub trace: Option<String>,
    /// At most so many live sessions; without it they start as recorded.
    pub concurrency: Option<u32>,
    /// What recorded gaps are divided by; 1 without it.
    pub time_scale: Option<f64>,
    /// A session's turns at most.
    pub max_turns: Option<u32>,
    /// Runs over consecutive seeds; 1 without it.
    pub runs: Option<u32>,
    /// The block of each prompt, counted from 0, that the client changes with every turn.
    pub changes_block: Option<u32>,
    /// Every so many turns of a session the last tenth of its history is missing.
    pub shortens_every: Option<u32>,
    /// What goes wrong, and when: a schedule such as `40s crash 1; 41s restart 1`, workers by their number in the cluster.
    pub faults: Option<String>,
}

/// One way to run a scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// Its name in statements, and of its folder.
    pub name: String,
    /// What it shows, where the name does not say.
    #[serde(default)]
    pub about: Option<String>,
    /// A cluster preset with its parameters.
    pub cluster: String,
    /// A policy with its parameters.
    pub policy: String,
    /// Where its load differs from the scenario's.
    #[serde(default)]
    pub load: Load,
}

impl Load {
    /// This load, with what it does not say taken from another.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        let other = other.clone();
        Self {
            trace: self.trace.clone().or(other.trace),
            concurrency: self.concurrency.or(other.concurrency),
            time_scale: self.time_scale.or(other.time_scale),
            max_turns: self.max_turns.or(other.max_turns),
            runs: self.runs.or(other.runs),
            changes_block: self.changes_block.or(other.changes_block),
            shortens_every: self.shortens_every.or(other.shortens_every),
            faults: self.faults.clone().or(other.faults),
        }
    }
}

impl Scenario {
    /// The setting of this name.
    #[must_use]
    pub fn setting(&self, name: &str) -> Option<&Setting> {
        self.setting.iter().find(|setting| setting.name == name)
    }
}

/// Their texts, in the order of the catalogue.
const TEXTS: &[&str] = &[
    include_str!("../scenarios/cascade.toml"),
    include_str!("../scenarios/cold-decode.toml"),
    include_str!("../scenarios/evict-storm.toml"),
    include_str!("../scenarios/reseed-storm.toml"),
    include_str!("../scenarios/correction-crash.toml"),
    include_str!("../scenarios/session-pin.toml"),
    include_str!("../scenarios/idle-only-lru.toml"),
    include_str!("../scenarios/no-backpressure.toml"),
    include_str!("../scenarios/admission-in-loop.toml"),
    include_str!("../scenarios/blind-prefill.toml"),
    include_str!("../scenarios/time-scale.toml"),
    include_str!("../scenarios/single-run.toml"),
    include_str!("../scenarios/abort-storm.toml"),
    include_str!("../scenarios/stranded-kv.toml"),
    include_str!("../scenarios/silent-recompute.toml"),
    include_str!("../scenarios/stale-index.toml"),
    include_str!("../scenarios/permanent-blacklist.toml"),
    include_str!("../scenarios/early-clock.toml"),
    include_str!("../scenarios/phantom-load.toml"),
    include_str!("../scenarios/vanished-home.toml"),
    include_str!("../scenarios/index-growth.toml"),
    include_str!("../scenarios/prefix-breaker.toml"),
];

static SCENARIOS: LazyLock<Vec<Scenario>> = LazyLock::new(|| {
    let read = |text: &&str| toml::from_str(text).expect("a test reads every scenario");
    TEXTS.iter().map(read).collect()
});

/// All scenarios.
#[must_use]
pub fn scenarios() -> &'static [Scenario] {
    &SCENARIOS
}

/// The scenario of a mode.
#[must_use]
pub fn scenario(mode: ModeId) -> Option<&'static Scenario> {
    scenarios().iter().find(|scenario| scenario.mode == mode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_scenario_is_whole() {
        for text in TEXTS {
            let scenario: Scenario = toml::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
            let mode = scenario.mode;
            let names: BTreeSet<&str> = scenario.setting.iter().map(|setting| setting.name.as_str()).collect();
            assert_eq!(names.len(), scenario.setting.len(), "{mode}: names are used once");
            assert!(names.contains(OFF) && names.contains(ON), "{mode}");
            for statement in &scenario.holds {
                for name in statement.settings() {
                    assert!(names.contains(name), "{mode}: {statement}");
                }
            }
            let about = |name: &str| {
                scenario
                    .holds
                    .iter()
                    .any(|statement| statement.settings().contains(&name))
            };
            assert!(
                about(OFF) && about(ON),
                "{mode}: the symptom shows and is gone, in numbers"
            );
        }
    }
}
