//! The papers' figures, as data: each value with the document and the section that it stands in.
//!
//! They lie in `paper.toml` and not in code, so that one can check them against the papers line by line, and so that a
//! test can ask whether every one of them has a row in the document. No figure of ours is in there.

use serde::Deserialize;
use std::collections::BTreeMap;

/// The figures of all papers.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paper {
    documents: BTreeMap<String, String>,
    figures: BTreeMap<String, Figure>,
}

/// A figure of a paper; several values where the paper gives it for several runs, workers or quantiles.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// The values as the paper prints them.
    pub values: Vec<f64>,
    /// Their unit, such as `s`; empty for counts and shares.
    #[serde(default)]
    pub unit: String,
    /// The document, by its key in [`Paper::document`].
    pub source: String,
    /// The section of the document.
    pub section: String,
    /// What a reader must know about it, such as that it was expected and not measured.
    #[serde(default)]
    pub note: Option<String>,
}

impl Paper {
    /// The figures that come with this crate.
    #[must_use]
    pub fn load() -> Self {
        toml::from_str(include_str!("../paper.toml")).expect("a test reads the file")
    }

    /// The figure with this key.
    ///
    /// # Panics
    /// If there is none: keys are written in this crate only.
    #[must_use]
    pub fn figure(&self, key: &str) -> &Figure {
        self.figures
            .get(key)
            .unwrap_or_else(|| panic!("`{key}` is a key of paper.toml"))
    }

    /// The keys of all figures.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.figures.keys().map(String::as_str)
    }

    /// The title of a document.
    #[must_use]
    pub fn document<'a>(&'a self, source: &'a str) -> &'a str {
        self.documents.get(source).map_or(source, String::as_str)
    }

    /// The documents: their keys and titles.
    pub fn documents(&self) -> impl Iterator<Item = (&str, &str)> {
        self.documents.iter().map(|(key, title)| (key.as_str(), title.as_str()))
    }
}

impl Figure {
    /// The mean of its values: what one of our means is compared with.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.values.iter().sum::<f64>() / self.values.len() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_has_a_value_and_a_place_in_a_document() {
        let paper = Paper::load();
        for key in paper.keys() {
            let figure = paper.figure(key);
            assert!(!figure.values.is_empty(), "{key}");
            assert!(!figure.section.is_empty(), "{key}");
            assert!(paper.documents.contains_key(&figure.source), "{key}");
        }
    }

    #[test]
    fn sums_and_ratios_of_the_papers_agree_with_their_parts() {
        let paper = Paper::load();
        let sum = |key: &str| paper.figure(key).values.iter().sum::<f64>();
        let value = |key: &str| paper.figure(key).mean();
        assert_eq!(sum("workers.transfer_errors"), value("workers.transfer_errors.sum"));
        assert_eq!(sum("pside.transfer_errors"), value("workers.transfer_errors.sum"));
        assert_eq!(sum("cold.bindings"), value("cascade.requests"));
        assert_eq!(sum("pside.requests"), 4449.0);
        for run in ["run1", "run2", "run3"] {
            assert_eq!(sum(&format!("pin.histogram.{run}")), 52.0);
        }
        let ratio = value("pin.starved_peak") / value("pin.lucky_peak");
        assert!((ratio - value("pin.peak_ratio")).abs() < 0.005);
    }
}
