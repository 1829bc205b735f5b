//! Generators: traces with the statistics of real ones, for machines that have no recorded trace, and for tests.
//!
//! A generator is named like `gen:agent:sessions=60:seed=3`. The same name and seed give the same trace on every machine.
//! A new generator is a file beside these and an arm in [`generate`].

mod agent;
mod e2;
mod elastic850;
mod history;
mod parameters;
mod pool;
mod swe52;

use crate::trace::Trace;
use parameters::{Parameters, suggestion};

/// What a generator's name begins with.
const PREFIX: &str = "gen:";

/// The generators there are.
const NAMES: [&str; 4] = ["agent", "e2", "elastic850", "swe52"];

/// Sessions of a generated trace: enough for millions of requests, few enough for memory.
const SESSIONS_MAX: u32 = 100_000;

/// Why a generator's name means nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeneratorError {
    /// There is no such generator.
    #[error("unknown generator `{name}`, expected `gen:agent`, `gen:e2`, `gen:elastic850` or `gen:swe52`{hint}")]
    UnknownGenerator {
        /// The name.
        name: String,
        /// The nearest name, as a question on a line of its own, if one is near.
        hint: String,
    },
    /// A part is no parameter.
    #[error("`{part}` is no parameter of `gen:{generator}`, expected `name=value`")]
    NoParameter {
        /// The part.
        part: String,
        /// The generator.
        generator: String,
    },
    /// The generator has no such parameter.
    #[error("unknown parameter `{name}` of `gen:{generator}`, expected one of {expected}{hint}")]
    UnknownParameter {
        /// The name.
        name: String,
        /// The generator.
        generator: String,
        /// All names.
        expected: String,
        /// The nearest name, as a question on a line of its own, if one is near.
        hint: String,
    },
    /// A parameter is given twice.
    #[error("parameter `{name}` is given twice")]
    Twice {
        /// The name.
        name: String,
    },
    /// A parameter's value cannot be.
    #[error("parameter `{name}` is `{value}`, expected {expected}")]
    Value {
        /// The name.
        name: String,
        /// The value.
        value: String,
        /// What it should be.
        expected: String,
    },
}

/// Whether this names a generator rather than a file.
#[must_use]
pub fn is_generator(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// The trace of a generator. `seed` is used where the name has no `seed=` of its own.
///
/// # Errors
/// If there is no such generator, it has no such parameter, or a value cannot be.
pub fn generate(name: &str, seed: u64) -> Result<Trace, GeneratorError> {
    let mut parts = name.strip_prefix(PREFIX).unwrap_or(name).split(':');
    let generator = parts.next().unwrap_or_default();
    let unknown = || GeneratorError::UnknownGenerator {
        name: format!("{PREFIX}{generator}"),
        hint: suggestion(generator, &NAMES, PREFIX),
    };
    if !NAMES.contains(&generator) {
        return Err(unknown());
    }
    let mut parameters = Parameters::parse(generator, parts)?;
    let seed = parameters.seed(seed)?;
    let (block_size, sessions) = match generator {
        "agent" => agent::sessions(&agent::Config::take(&mut parameters)?, seed),
        "e2" => e2::sessions(&e2::Config::take(&mut parameters)?, seed),
        "elastic850" => elastic850::sessions(&elastic850::Config::take(&mut parameters)?, seed),
        "swe52" => swe52::sessions(&swe52::Config::take(&mut parameters)?, seed),
        _ => return Err(unknown()),
    };
    Ok(Trace {
        name: name.to_owned(),
        block_size,
        sessions,
    })
}

/// What `of` is for `count` where it was given for `base`.
fn proportional(of: u32, count: u32, base: u32) -> u32 {
    (f64::from(of) * f64::from(count) / f64::from(base)).round() as u32
}

/// Whole parts of `total` in proportion to `weights`; each gets at least 1 where there is enough.
fn apportioned(weights: &[f64], total: u32) -> Vec<u32> {
    let least = u32::from(total as usize >= weights.len());
    let rest = f64::from(total) - f64::from(least) * weights.len() as f64;
    let all: f64 = weights.iter().sum();
    let (mut sum, mut given) = (0.0, 0);
    let parts = weights.iter().map(|weight| {
        // Rounding the running sum, and not each part, keeps the total.
        sum += weight / all * rest;
        let until = sum.round() as u32;
        least + until - std::mem::replace(&mut given, until)
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_error(name: &str, expected: &str) {
        assert_eq!(
            generate(name, 1).expect_err("a bad name").to_string(),
            expected,
            "for {name}"
        );
    }

    #[test]
    fn a_bad_name_is_refused_with_what_was_expected() {
        check_error(
            "gen:agnet",
            "unknown generator `gen:agnet`, expected `gen:agent`, `gen:e2`, `gen:elastic850` or `gen:swe52`\n\
             hint: did you mean `gen:agent`?",
        );
        check_error(
            "gen:",
            "unknown generator `gen:`, expected `gen:agent`, `gen:e2`, `gen:elastic850` or `gen:swe52`",
        );
        check_error(
            "gen:agent:sesions=3",
            "unknown parameter `sesions` of `gen:agent`, expected one of `seed`, `sessions`, `turns`, `versions`, `context`, \
             `rewrites`, `subagents`, `block`\nhint: did you mean `sessions`?",
        );
        check_error(
            "gen:agent:60",
            "`60` is no parameter of `gen:agent`, expected `name=value`",
        );
        check_error(
            "gen:agent:sessions=0",
            "parameter `sessions` is `0`, expected a number from 1 to 100000",
        );
        check_error(
            "gen:agent:sessions=many",
            "parameter `sessions` is `many`, expected a number from 1 to 100000",
        );
        check_error(
            "gen:agent:rewrites=2",
            "parameter `rewrites` is `2`, expected a share from 0 to 1",
        );
        check_error(
            "gen:agent:seed=-1",
            "parameter `seed` is `-1`, expected a number from 0 to 18446744073709551615",
        );
        check_error("gen:swe52:seed=1:seed=2", "parameter `seed` is given twice");
    }

    #[test]
    fn memory_grows_with_the_tokens_of_the_last_prompts() {
        for name in ["gen:agent:sessions=20", "gen:swe52:sessions=20", "gen:e2"] {
            let trace = generate(name, 1).expect("a good name");
            let turns = trace.sessions.iter().flat_map(|session| &session.turns);
            let listed: usize = turns.clone().map(|turn| turn.content.len()).sum();
            let mut held = 0;
            for session in &trace.sessions {
                let lists = session.turns.iter().enumerate().filter(|(index, turn)| {
                    let later = &session.turns[index + 1..];
                    !later.iter().any(|other| turn.content.shares_memory(&other.content))
                });
                held += lists.map(|(_, turn)| turn.content.held()).sum::<usize>();
            }
            let a_turn = held * 8 / trace.turn_count();
            assert!(
                a_turn < 4096,
                "{name} holds {a_turn} bytes of ids a turn, {held} of {listed} ids"
            );
        }
    }

    #[test]
    fn a_name_and_a_seed_make_one_trace() {
        for name in [
            "gen:agent:sessions=3:turns=5",
            "gen:e2:sessions=3",
            "gen:elastic850:sessions=3",
            "gen:swe52:sessions=3",
        ] {
            let trace = |suffix: &str, seed: u64| {
                generate(&format!("{name}{suffix}"), seed)
                    .expect("a good name")
                    .sessions
            };
            assert_eq!(trace("", 7), trace("", 7), "{name}");
            assert_eq!(trace(":seed=7", 8), trace("", 7), "{name}");
            assert_ne!(trace("", 7), trace("", 8), "{name}");
        }
    }
}
