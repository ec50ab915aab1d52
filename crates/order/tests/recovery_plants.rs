//! The plants of recovery's decisions do what they promise, and its rare paths are counted.
#![cfg(feature = "probe")]

mod common;

use std::sync::{Mutex, PoisonError};

use common::write;
use riopipe_order::attribute::{Attribute, Flags, GroupTag, Member, Seq, StreamId};
use riopipe_order::entry::{Origin, Position};
use riopipe_order::ordering_log::LoggedEntry;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::recovery::{ListedEntry, StreamList, StreamPlan, decide, validate};

/// Runs with a bug planted, one at a time in this process.
fn with<T>(plant: impl Into<Option<Plant>>, f: impl FnOnce() -> T) -> T {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    probe::plant(plant.into());
    let result = f();
    probe::plant(None);
    result
}

fn counts(rare: Rare, f: impl FnOnce()) -> u64 {
    let count = || probe::counts()[rare as usize];
    with(None, || {
        let before = count();
        f();
        count() - before
    })
}

fn list(server: u16, released: u64, entries: &[(Attribute, bool)]) -> StreamList {
    let entry = |&(attribute, durable): &(Attribute, bool)| ListedEntry {
        position: Position(attribute.seq.0),
        attribute: Attribute { member: Member(server as u8), ..attribute },
        incarnation: 1,
        persisted: durable,
        durable,
    };
    StreamList {
        in_doubt: false,
        server,
        released: Seq(released),
        newest_tag: GroupTag::new(Seq(released), 0),
        settled: false,
        entries: entries.iter().map(entry).collect(),
    }
}

fn plan(lists: &[StreamList]) -> StreamPlan {
    decide(StreamId(0), lists, |member| Some(u16::from(member.0))).unwrap()
}

fn durable(entries: &[(Attribute, bool)]) -> Vec<bool> {
    let entry = |&(attribute, persisted): &(Attribute, bool)| LoggedEntry {
        position: Position(attribute.seq.0),
        attribute,
        origin: Origin { generation: 1, incarnation: 1 },
        persisted,
    };
    let entries: Vec<LoggedEntry> = entries.iter().map(entry).collect();
    validate(&entries)
}

fn half(index: u16) -> Attribute {
    Attribute { num: 2, index, ..write(5, 1) }
}

fn extension(seq: u64) -> Attribute {
    Attribute { flags: Flags::EXTEND, ..write(seq, 1) }
}

fn in_place(seq: u64) -> Attribute {
    Attribute { flags: Flags::IN_PLACE, ..write(seq, 1) }
}

#[test]
fn t1_smallest_mark() {
    let lists = [list(0, 9, &[]), list(1, 4, &[(write(6, 1), false)])];
    assert_eq!(with(None, || plan(&lists)).k, Seq(9));
    let wrong = with(Plant::T1SmallestMark, || plan(&lists));
    assert_eq!((wrong.k, wrong.undone_blocks()), (Seq(4), 1));
}

#[test]
fn t4_cover_other_drive() {
    let flush = Attribute { flags: Flags::FLUSH, member: Member(1), ..write(2, 2) };
    let entries = [(write(1, 1), false), (flush, true)];
    assert_eq!(with(None, || durable(&entries)), [false, true]);
    assert_eq!(with(Plant::T4CoverOtherDrive, || durable(&entries)), [true, true]);
}

#[test]
fn t6_ignore_num_and_count_twice() {
    let lists = [list(0, 4, &[(half(0), true), (half(0), true)]), list(1, 4, &[])];
    assert_eq!(with(None, || plan(&lists)).k, Seq(4));
    assert_eq!(with(Plant::T6IgnoreNum, || plan(&lists)).k, Seq(5));
    assert_eq!(with(Plant::T6CountTwice, || plan(&lists)).k, Seq(5));
}

#[test]
fn t11_undo_in_place_and_not_listed() {
    let lists = [list(0, 4, &[(in_place(6), true)])];
    let parts = |plan: StreamPlan| (plan.undo.len(), plan.in_place.len());
    assert_eq!(parts(with(None, || plan(&lists))), (0, 1));
    assert_eq!(parts(with(Plant::T11UndoInPlace, || plan(&lists))), (1, 1));
    assert_eq!(parts(with(Plant::T11NotListed, || plan(&lists))), (0, 0));
    let lists = [list(0, 4, &[(extension(6), true)])];
    assert_eq!(parts(with(None, || plan(&lists))), (0, 0));
    assert_eq!(parts(with(Plant::T11UndoExtensions, || plan(&lists))), (1, 0));
    assert_eq!(parts(with(Plant::T11ListExtensions, || plan(&lists))), (0, 1));
}

#[test]
fn rare_paths_are_counted() {
    let one = |entries: &[(Attribute, bool)]| {
        plan(&[list(0, 4, entries), list(1, 4, &[])]);
    };
    let partial = counts(Rare::PartialGroup, || one(&[(half(0), true)]));
    assert_eq!(partial, 1);
    assert_eq!(counts(Rare::PartialGroup, || one(&[(write(6, 1), true)])), 0);
    assert_eq!(counts(Rare::WholeBeyondK, || one(&[(write(6, 1), true)])), 1);
    assert_eq!(counts(Rare::WholeBeyondK, || one(&[(write(5, 1), true)])), 0);
    assert_eq!(counts(Rare::ExtensionLeft, || one(&[(extension(6), true)])), 1);
    assert_eq!(counts(Rare::InPlaceListed, || one(&[(in_place(6), true)])), 1);
    let settled = [StreamList { settled: true, ..list(0, 4, &[]) }, list(1, 4, &[])];
    assert_eq!(counts(Rare::SettledBefore, || drop(plan(&settled))), 1);
    assert_eq!(counts(Rare::SettledBefore, || one(&[])), 0);
    let flush = Attribute { flags: Flags::FLUSH, ..write(2, 2) };
    let covered = [(write(1, 1), false), (flush, true)];
    assert_eq!(counts(Rare::CoveredByFlush, || drop(durable(&covered))), 1);
    let on = |seq| Attribute { member: Member(3), lba: 7, ..write(seq, 1) };
    let over = [(on(1), false), (on(2), true)];
    assert_eq!(counts(Rare::CoveredByOverlap, || drop(durable(&over))), 1);
}
