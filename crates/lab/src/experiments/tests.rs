//! What holds of all experiments together, and the arithmetic that they share.

use super::*;
use std::collections::BTreeSet;

#[test]
fn setups_can_be_read_and_names_differ() {
    let names: BTreeSet<&str> = ALL.iter().map(|experiment| experiment.name).collect();
    assert_eq!(names.len(), ALL.len());
    for setup in ALL.iter().flat_map(|experiment| (experiment.setups)()) {
        let trace = setup.trace(1).expect(&setup.trace);
        setup
            .config(&trace, 1)
            .unwrap_or_else(|error| panic!("{}: {error}", setup.command()));
    }
}

#[test]
fn the_most_uneven_is_compared_with_the_mean() {
    let check = |values: &[f64], expected: Option<f64>| assert_eq!(largest_by_mean(values), expected, "{values:?}");
    // The papers' transfer errors of their six decode workers: 153 by 61.5.
    check(&[0.0, 4.0, 153.0, 29.0, 90.0, 93.0], Some(153.0 / 61.5));
    check(&[2.0, 2.0], Some(1.0));
    check(&[0.0, 0.0], None);
    check(&[], None);
}
