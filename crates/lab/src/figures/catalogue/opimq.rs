//! The figures of *OPIMQ: Order Preserving IO stack for Multi-Queue Block Device* (FAST '25).

use super::{
    Axis, BARRIER, Block, Claim, Contender, Entry, Experiment, LINUX, Measure, NONE, ONE_FLASH,
    OPIMQ, ORDERLESS, Paper, RIO, WITH_BARRIER, WITH_LINUX, WITH_OPIMQ, claim,
};

/// Title of the paper, for sources.
macro_rules! opimq {
    ($place:literal) => {
        concat!("OPIMQ, FAST '25, ", $place)
    };
}

const MOVING: Contender = Contender::new("OPIMQ, threads move", "opimq").moving();
const NONE_MOVING: Contender = Contender::new("orderless, threads move", "none").moving();

/// The paper has random writes at 3.4 % of orderless ones with transfer and flush, and at 47 % with
/// one queue.
const QUEUE_CLAIMS: &[Claim] = &[
    claim(ORDERLESS, LINUX, Measure::Writes, Some(29.0), 10.0),
    claim(ORDERLESS, BARRIER, Measure::Writes, Some(2.1), 1.2),
    claim(OPIMQ, BARRIER, Measure::Writes, None, 1.2),
    claim(OPIMQ, ORDERLESS, Measure::Writes, None, 0.7),
];

const PINNING_CLAIMS: &[Claim] = &[
    claim(OPIMQ, ORDERLESS, Measure::Writes, None, 0.7),
    claim("OPIMQ, threads move", "orderless, threads move", Measure::Writes, None, 0.7),
];

/// The figures, in the order of the paper.
pub(super) const FIGURES: &[Entry] = &[
    Entry {
        id: "opimq-queues",
        title: "Ordered writes of many threads",
        source: opimq!("motivation: random writes with one queue and with several"),
        question: "What does it cost if all threads share one queue?",
        experiment: Experiment::Block(Block {
            paper: Paper::Opimq,
            targets: ONE_FLASH,
            axis: Axis::ManyThreads,
            contenders: &[WITH_LINUX, WITH_BARRIER, WITH_OPIMQ, RIO, NONE],
            panels: &[Measure::Writes, Measure::InFlight],
            claims: QUEUE_CLAIMS,
            conclusion: "order with several queues keeps the speed that one queue loses",
        }),
    },
    Entry {
        id: "opimq-pinning",
        title: "Epoch pinning, with threads that move",
        source: opimq!("epoch pinning overhead"),
        question: "What does it cost to keep the writes of an epoch on one queue?",
        experiment: Experiment::Block(Block {
            paper: Paper::Opimq,
            targets: ONE_FLASH,
            axis: Axis::JournalThreads,
            contenders: &[WITH_OPIMQ, MOVING, NONE, NONE_MOVING],
            panels: &[Measure::Writes, Measure::InitiatorEfficiency],
            claims: PINNING_CLAIMS,
            conclusion: "epoch pinning costs next to nothing",
        }),
    },
];
