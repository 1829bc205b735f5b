//! The cells of the comparison: workload, hardware, load, shape, host memory.

use super::Extent;
use crate::results::Results;
use crate::setup::{Arrivals, Setup};

/// A workload on hardware, at rising loads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    /// What it is called.
    pub name: &'static str,
    /// The trace or generator.
    pub trace: &'static str,
    /// What recorded gaps are divided by.
    pub time_scale: u32,
    /// The shapes, as presets.
    pub shapes: &'static [&'static str],
    /// Host memory of each worker with which it is run too.
    pub host: Option<&'static str>,
    /// Live sessions, rising; one load where sessions start as recorded.
    pub loads: &'static [u32],
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
    /// The family's name.
    pub family: &'static str,
    trace: &'static str,
    time_scale: u32,
    /// The cluster.
    pub cluster: String,
    arrivals: Arrivals,
    /// Its load.
    pub level: Level,
}

/// The families, Mooncake's conversations and the coding agents among them where their traces lie in the working folder.
#[must_use]
pub fn families(extent: Extent) -> Vec<Family> {
    let swe52 = Family {
        name: "52 SWE sessions, gaps by 10",
        trace: "gen:swe52",
        time_scale: 10,
        shapes: &["h100x8-dp", "h100x8-2p6d"],
        host: Some("128GiB"),
        loads: &[8, 16, 24, 32, 42, 52],
    };
    if extent == Extent::Quick {
        return vec![Family {
            name: "12 SWE sessions on two workers",
            trace: "gen:swe52:sessions=12",
            shapes: &["h100x2-dp"],
            host: None,
            loads: &[2, 4, 6, 8],
            ..swe52
        }];
    }
    let agents = Family {
        name: "60 agents, generated",
        trace: "gen:agent:sessions=60",
        time_scale: 1,
        shapes: &["h200x8-dp", "h200x8-2p6d"],
        host: Some("256GiB"),
        loads: &[8, 16, 32, 48, 60],
    };
    let elastic = Family {
        name: "850 elastic requests",
        trace: "gen:elastic850",
        time_scale: 1,
        shapes: &["h20x8-dp:kv=250K"],
        host: Some("128GiB"),
        loads: &[],
    };
    let mut families = vec![
        Family {
            name: "52 SWE sessions, true gaps",
            time_scale: 1,
            ..swe52.clone()
        },
        swe52,
        elastic,
        agents.clone(),
    ];
    let recorded = |file: &'static str| std::path::Path::new(file).is_file();
    let coding = "claude-code-180.jsonl.zst";
    if recorded(coding) {
        families.push(Family {
            name: "180 recorded coding agents",
            trace: coding,
            loads: &[16, 32, 64, 96, 128, 180],
            ..agents
        });
    }
    families
}

impl Family {
    fn arrivals(&self) -> Vec<Arrivals> {
        if self.loads.is_empty() {
            return vec![Arrivals::Recorded];
        }
        self.loads.iter().map(|live| Arrivals::LiveSessions(*live)).collect()
    }

    fn cell(&self, cluster: String, arrivals: Arrivals, level: Level) -> Cell {
        Cell {
            family: self.name,
            trace: self.trace,
            time_scale: self.time_scale,
            cluster,
            arrivals,
            level,
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
        Setup::new(self.trace, &self.cluster, policy)
            .time_scale(self.time_scale)
            .arrivals(self.arrivals)
            .seeds(seeds)
    }

    /// Its heading.
    #[must_use]
    pub fn title(&self) -> String {
        let load = match self.arrivals {
            Arrivals::Recorded => "as recorded".to_owned(),
            Arrivals::LiveSessions(live) => format!("{live} live sessions"),
        };
        let level = match self.level {
            Level::Light => "light: ",
            Level::Knee => "the knee: ",
            Level::Beyond => "beyond the knee: ",
            Level::Recorded => "",
        };
        format!("{}, `{}`, {level}{load}", self.family, self.cluster)
    }
}

/// What the scouts run in a family, on its first shape: every load, one seed.
#[must_use]
pub fn ladder(family: &Family, scouts: &[&str]) -> Vec<Setup> {
    if family.loads.is_empty() {
        return Vec::new();
    }
    let steps = family.arrivals().into_iter();
    steps
        .flat_map(|arrivals| {
            let cell = family.cell(family.shapes[0].to_owned(), arrivals, Level::Light);
            scouts.iter().map(move |scout| cell.setup(scout, 1)).collect::<Vec<_>>()
        })
        .collect()
}

/// The cells of a family at the loads that the scouts found.
pub(super) fn of_family(family: &Family, scouts: &[&str], scouted: &Results) -> Vec<Cell> {
    let at: Vec<(Arrivals, Level)> = if family.loads.is_empty() {
        vec![(Arrivals::Recorded, Level::Recorded)]
    } else {
        let best = |arrivals: Arrivals| {
            let cell = family.cell(family.shapes[0].to_owned(), arrivals, Level::Light);
            let p90 = |scout: &&str| scouted.of(&cell.setup(scout, 1))[0].run.ttft_s.p90;
            scouts.iter().filter_map(p90).fold(f64::INFINITY, f64::min)
        };
        let p90s: Vec<f64> = family.arrivals().into_iter().map(best).collect();
        levels(family.loads, &p90s)
            .into_iter()
            .map(|(live, level)| (Arrivals::LiveSessions(live), level))
            .collect()
    };
    let clusters = family.clusters().into_iter();
    clusters
        .flat_map(|cluster| {
            at.iter()
                .map(|(arrivals, level)| family.cell(cluster.clone(), *arrivals, *level))
                .collect::<Vec<_>>()
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
        let family = &families(Extent::Full)[1];
        assert_eq!(
            family.clusters(),
            [
                "h100x8-dp",
                "h100x8-2p6d",
                "h100x8-dp:host=128GiB",
                "h100x8-2p6d:host=128GiB"
            ]
        );
        assert_eq!(ladder(family, &["sticky", "linear"]).len(), 12);
    }
}
