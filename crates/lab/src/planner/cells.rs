//! The cells of the comparison: workload, hardware, load, shape, host memory.

use super::Extent;
use super::outcome::Outcomes;
use crate::setup::{Arrivals, Setup};

/// A workload on hardware, at rising loads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    /// What it is called where families are chosen.
    pub key: &'static str,
    /// What it is called in the document.
    pub name: &'static str,
    /// The trace or generator.
    pub trace: &'static str,
    /// What recorded gaps are divided by, where that is not the load.
    pub time_scale: u32,
    /// Sessions end before they are longer than this, in tokens.
    pub max_context: Option<u32>,
    /// So many sessions of the trace, its first; all without.
    pub sessions: Option<u32>,
    /// The shapes, as presets.
    pub shapes: &'static [&'static str],
    /// Host memory of each worker with which it is run too.
    pub host: Option<&'static str>,
    /// How it is made heavier.
    pub loads: Loads,
}

/// Rising loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loads {
    /// So many live sessions.
    Live(&'static [u32]),
    /// Requests that come as recorded, so many times as fast.
    Faster(&'static [u32]),
}

/// How heavy a cell's load is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The lightest.
    Light,
    /// The lightest load at which the best other policy's TTFT p90 is three times that at the lightest.
    Knee,
    /// The first load from 1.3 times the knee on.
    Beyond,
    /// The one load that the trace has.
    Recorded,
}

/// A cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The workload.
    pub family: Family,
    /// The cluster.
    pub cluster: String,
    /// Live sessions, or how many times as fast.
    pub load: u32,
    /// What that means here.
    pub level: Level,
}

const SWE52: Family = Family {
    key: "swe52-by-10",
    name: "52 SWE sessions, gaps by 10",
    trace: "gen:swe52",
    time_scale: 10,
    max_context: None,
    sessions: None,
    shapes: &["h100x8-dp", "h100x8-2p6d"],
    host: Some("128GiB"),
    loads: Loads::Live(&[8, 16, 24, 32, 42, 52]),
};

/// A small family: that the document can be made, within minutes.
const SMALL: Family = Family {
    key: "small",
    name: "12 SWE sessions on two workers, gaps by 10",
    trace: "gen:swe52:sessions=12",
    shapes: &["h100x2-dp"],
    host: None,
    loads: Loads::Live(&[2, 4, 6, 8]),
    ..SWE52
};

const FULL: [Family; 6] = [
    SWE52,
    Family {
        key: "swe52",
        name: "52 SWE sessions, true gaps",
        time_scale: 1,
        ..SWE52
    },
    Family {
        key: "elastic",
        name: "850 elastic requests",
        trace: "gen:elastic850",
        time_scale: 1,
        shapes: &["h20x8-dp:kv=250K"],
        host: Some("128GiB"),
        loads: Loads::Faster(&[1]),
        ..SWE52
    },
    Family {
        key: "agents",
        name: "200 agents, generated",
        trace: "gen:agent:sessions=200",
        time_scale: 1,
        max_context: Some(600_000),
        sessions: None,
        shapes: &["h200x8-dp", "h200x8-2p6d"],
        host: Some("256GiB"),
        loads: Loads::Live(&[8, 16, 32, 48, 64, 80, 104]),
    },
    Family {
        key: "recorded-agents",
        name: "45 recorded coding agents",
        trace: "claude-code-180.jsonl.zst",
        time_scale: 1,
        max_context: Some(600_000),
        sessions: Some(45),
        shapes: &["h200x4-dp", "h200x4-1p3d"],
        host: Some("256GiB"),
        loads: Loads::Live(&[4, 8, 16, 24, 32, 45]),
    },
    Family {
        key: "conversations",
        name: "4,000 of Mooncake's conversations",
        trace: "mooncake-conversation.jsonl.zst",
        time_scale: 1,
        max_context: None,
        sessions: Some(4_000),
        shapes: &["h200x8-dp", "h200x8-2p6d"],
        host: Some("256GiB"),
        loads: Loads::Faster(&[1, 2, 3, 4, 6]),
    },
];

/// All families, the small one first.
pub(super) fn known() -> Vec<Family> {
    [SMALL].into_iter().chain(FULL).collect()
}

/// The families of an extent, those with a recorded trace where it lies in the working folder.
#[must_use]
pub fn families(extent: Extent) -> Vec<Family> {
    let there = |family: &Family| !family.is_recorded() || std::path::Path::new(family.trace).is_file();
    match extent {
        Extent::Quick => vec![SMALL],
        Extent::Full | Extent::Brief => FULL.into_iter().filter(there).collect(),
    }
}

/// The names by which families are chosen.
pub fn keys() -> impl Iterator<Item = &'static str> {
    [SMALL].into_iter().chain(FULL).map(|family| family.key)
}

impl Family {
    /// Whether its trace is a file that is no part of the project.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        !homing_workload::is_generator(self.trace)
    }

    fn steps(&self) -> &'static [u32] {
        match self.loads {
            Loads::Live(steps) | Loads::Faster(steps) => steps,
        }
    }

    /// Its cell on its first shape, for the search of its knee.
    fn cell(&self, load: u32) -> Cell {
        Cell {
            family: self.clone(),
            cluster: self.shapes[0].to_owned(),
            load,
            level: Level::Light,
        }
    }

    fn clusters(&self) -> Vec<String> {
        let with_host = |shape: &&str| self.host.map(|host| format!("{shape}:host={host}"));
        let plain = self.shapes.iter().map(|shape| (*shape).to_owned());
        plain.chain(self.shapes.iter().filter_map(with_host)).collect()
    }
}

impl Cell {
    /// What a policy runs in it.
    #[must_use]
    pub fn setup(&self, policy: &str, seeds: u64) -> Setup {
        let (arrivals, time_scale) = match self.family.loads {
            Loads::Live(_) => (Arrivals::LiveSessions(self.load), self.family.time_scale),
            Loads::Faster(_) => (Arrivals::Recorded, self.load),
        };
        Setup::new(self.family.trace, &self.cluster, policy)
            .time_scale(time_scale)
            .arrivals(arrivals)
            .max_context(self.family.max_context)
            .sessions(self.family.sessions)
            .seeds(seeds)
    }

    /// Whether it counts as loaded: at and beyond the knee, and where there is one load only.
    #[must_use]
    pub fn is_heavy(&self) -> bool {
        self.level != Level::Light
    }

    /// Whether it is one of a brief comparison.
    #[must_use]
    pub(super) fn is_brief(&self) -> bool {
        let first = self.cluster.starts_with(self.family.shapes[0]);
        match self.level {
            Level::Light => false,
            Level::Knee | Level::Recorded => first || !self.cluster.contains(":host="),
            // What is beyond the data-parallel shape's knee drowns the other one, and takes minutes a run.
            Level::Beyond => first,
        }
    }

    /// Its heading.
    #[must_use]
    pub fn title(&self) -> String {
        format!("{}, `{}`, {}", self.family.name, self.cluster, self.place())
    }

    /// Its load, in words.
    #[must_use]
    pub fn place(&self) -> String {
        let load = match self.family.loads {
            Loads::Live(_) => format!("{} live sessions", self.load),
            Loads::Faster(_) if self.load == 1 => "as recorded".to_owned(),
            Loads::Faster(_) => format!("{} times as fast", self.load),
        };
        let level = match self.level {
            Level::Light => "light: ",
            Level::Knee => "the knee: ",
            Level::Beyond => "beyond the knee: ",
            Level::Recorded => "",
        };
        format!("{level}{load}")
    }
}

/// What the scouts run in a family, on its first shape: every load, one seed.
#[must_use]
pub fn ladder(family: &Family, scouts: &[&str]) -> Vec<Setup> {
    let steps = family.steps().iter().filter(|_| family.steps().len() > 1);
    steps
        .flat_map(|load| scouts.iter().map(|scout| family.cell(*load).setup(scout, 1)))
        .collect()
}

/// The cells of a family at the loads that the scouts found.
pub(super) fn of_family(family: &Family, scouts: &[&str], scouted: &Outcomes) -> Vec<Cell> {
    let at = match family.steps() {
        [only] => vec![(*only, Level::Recorded)],
        steps => {
            let best = |load: &u32| {
                let p90 = |scout: &&str| scouted.of(&family.cell(*load).setup(scout, 1))[0].ttft_p90_s;
                scouts.iter().filter_map(p90).fold(f64::INFINITY, f64::min)
            };
            levels(steps, &steps.iter().map(best).collect::<Vec<f64>>())
        }
    };
    let clusters = family.clusters().into_iter();
    clusters
        .flat_map(|cluster| {
            at.iter().map(move |(load, level)| Cell {
                level: *level,
                cluster: cluster.clone(),
                ..family.cell(*load)
            })
        })
        .collect()
}

/// The light load, the knee and what is beyond, of rising loads and the best TTFT p90 at each. A ladder that never reaches
/// three times its first figure has no knee: its heaviest load stands for it.
fn levels(loads: &[u32], p90s: &[f64]) -> Vec<(u32, Level)> {
    const KNEE: f64 = 3.0;
    const BEYOND: f64 = 1.3;
    let (Some(light), Some(heaviest)) = (loads.first().copied(), loads.last().copied()) else {
        return Vec::new();
    };
    let steep = p90s.iter().position(|p90| *p90 >= KNEE * p90s[0]);
    let knee = steep.map_or(heaviest, |index| loads[index]);
    let beyond = loads
        .iter()
        .copied()
        .find(|load| f64::from(*load) >= BEYOND * f64::from(knee));
    let mut levels = vec![(light, Level::Light)];
    if knee > light {
        levels.push((knee, Level::Knee));
    }
    levels.extend(beyond.map(|load| (load, Level::Beyond)));
    levels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_knee_is_where_the_best_others_bend() {
        let check = |p90s: [f64; 4], expected: &[(u32, Level)]| assert_eq!(levels(&[4, 8, 10, 12], &p90s), expected);
        let (light, knee, beyond) = (Level::Light, Level::Knee, Level::Beyond);
        // Three times is enough.
        check([0.125, 0.25, 0.375, 0.5], &[(4, light), (10, knee)]);
        check([0.1, 0.31, 0.9, 0.9], &[(4, light), (8, knee), (12, beyond)]);
        check([0.1, 0.1, 0.1, 0.2], &[(4, light), (12, knee)]);
        assert_eq!(levels(&[], &[]), []);
    }

    #[test]
    fn a_family_is_run_in_all_shapes_with_and_without_host_memory() {
        assert_eq!(
            SWE52.clusters(),
            [
                "h100x8-dp",
                "h100x8-2p6d",
                "h100x8-dp:host=128GiB",
                "h100x8-2p6d:host=128GiB"
            ]
        );
        assert_eq!(ladder(&SWE52, &["sticky", "linear"]).len(), 12);
    }

    #[test]
    fn one_load_is_not_searched_for_a_knee_and_recorded_arrivals_get_faster() {
        let [elastic, conversations] = ["elastic", "conversations"]
            .map(|key| FULL.into_iter().find(|family| family.key == key).expect("a family"));
        assert_eq!(ladder(&elastic, &["sticky"]), []);
        let setup = &ladder(&conversations, &["sticky"])[2];
        assert_eq!((setup.arrivals, setup.time_scale), (Arrivals::Recorded, 3));
        assert_eq!(
            Cell {
                load: 3,
                level: Level::Knee,
                ..conversations.cell(1)
            }
            .place(),
            "the knee: 3 times as fast"
        );
    }
}
