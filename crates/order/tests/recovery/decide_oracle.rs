//! The decision against an oracle that judges each group and block by itself; and again after every
//! partial settling (T9).

use std::collections::BTreeSet;

use proptest::prelude::*;
use riopipe_order::attribute::{Attribute, Flags, GroupTag, Kind, Member, Seq, StreamId};
use riopipe_order::entry::Position;
use riopipe_order::recovery::{ListedEntry, StreamList, StreamPlan, decide};

use crate::common::Choices;
use crate::{flush, write_at};

const STREAM: StreamId = StreamId(1);
const SERVERS: u16 = 3;
const BLOCKS: u64 = 24;

/// Each server has two members.
fn server_of(member: Member) -> Option<u16> {
    (u16::from(member.0) < 2 * SERVERS).then_some(u16::from(member.0) / 2)
}

/// The lists of three servers for one stream after a crash: of every group some of its entries, on
/// each server only those beyond its own mark.
fn random_lists(choices: &mut Choices) -> Vec<StreamList> {
    let base = choices.below(3) as u64;
    let mut all: Vec<(Attribute, bool)> = Vec::new();
    let mut next = base + 1;
    // Mostly durable at first, then less and less.
    while choices.below(12) > 0 && next < base + 24 {
        let span = if choices.below(5) == 0 { 1 + choices.below(3) as u64 } else { 1 };
        let num = if span > 1 { 1 } else { 1 + choices.below(4) as u16 };
        for index in 0..num {
            let member = choices.below(2 * usize::from(SERVERS)) as u8;
            let (lba, blocks) = (choices.below(20) as u64, 1 + choices.below(4) as u32);
            let mut a = match choices.below(8) {
                0 => flush(next, member),
                1 => Attribute { kind: Kind::Discard, ..write_at(next, member, lba, blocks) },
                _ => write_at(next, member, lba, blocks),
            };
            if a.kind == Kind::Write {
                a.flags = match choices.below(6) {
                    0 => a.flags.with(Flags::IN_PLACE),
                    1 | 2 => a.flags.with(Flags::EXTEND),
                    _ => a.flags,
                };
            }
            let tag = !(next + span - 1);
            let a = Attribute { index, num, span: span as u16, tag, ..a };
            let durable = choices.below(10) < 9;
            if choices.below(12) < 11 {
                all.push((a, durable));
            }
            // Logged twice by a replay.
            if choices.below(8) == 0 {
                all.push((Attribute { ordinal: 77, ..a }, choices.below(2) == 0));
            }
        }
        next += span;
    }
    // Released groups are durable, so the marks do not go beyond the durable prefix.
    let everything = lists_of(&all, &[Seq(base); SERVERS as usize]);
    let durable = oracle_prefix(&everything, Seq(base));
    let mut marks = [Seq(base); SERVERS as usize];
    for mark in &mut marks {
        let at = base + choices.below((durable.0 - base) as usize + 1) as u64;
        // A merged request is released as a whole.
        let inside = |a: &Attribute| a.seq.0 <= at && at < a.seq_end().0;
        let end = all.iter().find(|(a, _)| inside(a)).map_or(Seq(at), |(a, _)| a.seq_end());
        *mark = end;
    }
    lists_of(&all, &marks)
}

fn lists_of(all: &[(Attribute, bool)], marks: &[Seq; SERVERS as usize]) -> Vec<StreamList> {
    let lists = marks.iter().enumerate().map(|(server, &released)| {
        let here = |a: &Attribute| server_of(a.member) == Some(server as u16);
        let known = all.iter().map(|(a, _)| a).filter(|a| here(a) && a.seq_end() <= released);
        let newest = known.max_by_key(|a| a.seq_end());
        let live = all.iter().filter(|(a, _)| here(a) && a.seq_end() > released);
        StreamList {
            in_doubt: false,
            server: server as u16,
            released,
            newest_tag: newest.map_or(GroupTag::NONE, GroupTag::of_last_group),
            settled: false,
            entries: live
                .enumerate()
                .map(|(at, &(attribute, durable))| ListedEntry {
                    position: Position(at as u64),
                    attribute,
                    incarnation: 1,
                    persisted: false,
                    durable,
                })
                .collect(),
        }
    });
    lists.collect()
}

/// Counts on from the mark, group by group.
fn oracle_prefix(lists: &[StreamList], released: Seq) -> Seq {
    let all = || lists.iter().flat_map(|list| &list.entries);
    let mut k = released;
    loop {
        let next = k.next();
        let covers = |e: &&ListedEntry| e.attribute.seq <= next && next <= e.attribute.seq_end();
        let Some(one) = all().find(covers) else { return k };
        let whole = (0..one.attribute.num)
            .all(|index| all().filter(covers).any(|e| e.attribute.index == index && e.durable));
        if !whole {
            return k;
        }
        k = next;
    }
}

fn blocks_of(a: &Attribute) -> impl Iterator<Item = (u8, u64)> + use<> {
    let member = a.member.0;
    (a.lba..a.lba + u64::from(a.blocks)).map(move |block| (member, block))
}

/// The zeroed blocks: each block of a fresh write or a discard beyond k, even if it was written
/// otherwise, too.
fn oracle_undo(lists: &[StreamList], k: Seq) -> BTreeSet<(u8, u64)> {
    let unsettled = lists.iter().filter(|list| !list.settled).flat_map(|list| &list.entries);
    let beyond = unsettled.map(|e| &e.attribute).filter(|a| a.seq > k);
    let left = |a: &Attribute| a.flags.has(Flags::IN_PLACE) || a.flags.has(Flags::EXTEND);
    let fresh = beyond.filter(|a| !left(a) && a.kind != Kind::Flush);
    fresh.flat_map(blocks_of).collect()
}

fn oracle_in_place(lists: &[StreamList], k: Seq) -> BTreeSet<(Seq, u8, u64, u64)> {
    let beyond = lists.iter().flat_map(|list| &list.entries).map(|e| &e.attribute);
    let beyond = beyond.filter(|a| a.seq > k && a.flags.has(Flags::IN_PLACE));
    beyond.map(|a| (a.seq, a.member.0, a.lba, u64::from(a.blocks))).collect()
}

fn check(lists: &[StreamList], plan: &StreamPlan, k: Seq) -> Result<(), TestCaseError> {
    prop_assert_eq!(plan.k, k);
    let mut zeroed = BTreeSet::new();
    for extent in &plan.undo {
        for block in extent.lba..extent.lba + extent.blocks {
            prop_assert!(zeroed.insert((extent.member.0, block)), "no block twice");
            prop_assert!(block < BLOCKS);
        }
    }
    prop_assert_eq!(&zeroed, &oracle_undo(lists, k));
    let gaps = plan
        .undo
        .windows(2)
        .all(|pair| (pair[0].member, pair[0].lba + pair[0].blocks) < (pair[1].member, pair[1].lba));
    prop_assert!(gaps, "sorted, and adjacent ones joined: {:?}", plan.undo);
    let listed: Vec<_> = plan
        .in_place
        .iter()
        .map(|one| (one.seq, one.extent.member.0, one.extent.lba, one.extent.blocks))
        .collect();
    prop_assert_eq!(listed, Vec::from_iter(oracle_in_place(lists, k)));
    Ok(())
}

/// How far an interrupted recovery got on a server.
#[derive(Clone, Copy)]
enum Left {
    AsItWas,
    Kept,
    Forgotten,
}

/// A server's list after this plan has settled it (or not).
fn settled(list: &StreamList, plan: &StreamPlan, left: Left) -> StreamList {
    let mut list = list.clone();
    if matches!(left, Left::AsItWas) {
        return list;
    }
    list.settled = true;
    list.released = plan.k;
    list.newest_tag = GroupTag::new(plan.k, plan.tag);
    let kept = matches!(left, Left::Kept);
    list.entries.retain(|entry| kept && entry.attribute.seq_end() > plan.k);
    list
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_prefix_is_what_counting_finds(bytes in prop::collection::vec(any::<u16>(), 0..600)) {
        let lists = random_lists(&mut Choices::new(bytes));
        let plan = decide(STREAM, &lists, server_of).unwrap();
        let released = lists.iter().map(|list| list.released).max().unwrap();
        prop_assert_eq!(plan.released, released);
        check(&lists, &plan, oracle_prefix(&lists, released))?;
        prop_assert_eq!(plan.kept, plan.k.0 - released.0);
        let all = lists.iter().flat_map(|list| &list.entries);
        prop_assert_eq!(plan.found as usize, all.clone().count());
        let groups: BTreeSet<u64> = all
            .clone()
            .flat_map(|e| e.attribute.seq.0..=e.attribute.seq_end().0)
            .filter(|seq| *seq > plan.k.0)
            .collect();
        prop_assert_eq!(plan.dropped as usize, groups.len());
        // Tags are !seq here, so the tag shows the group that it is of.
        let known = all.map(|e| e.attribute.seq_end()).chain(lists.iter().map(|l| l.newest_tag.seq));
        let newest = known.filter(|seq| *seq <= plan.k).max().unwrap();
        prop_assert_eq!(plan.tag, if newest == Seq::ZERO { 0 } else { !newest.0 });
    }

    #[test]
    fn t9_the_same_prefix_after_every_partial_settling(
        bytes in prop::collection::vec(any::<u16>(), 0..400),
    ) {
        let lists = random_lists(&mut Choices::new(bytes));
        let first = decide(STREAM, &lists, server_of).unwrap();
        let states = [Left::AsItWas, Left::Kept, Left::Forgotten];
        for number in 0..27 {
            let way = |server: usize| states[number / 3_usize.pow(server as u32) % 3];
            let now: Vec<StreamList> =
                lists.iter().enumerate().map(|(i, list)| settled(list, &first, way(i))).collect();
            let again = decide(STREAM, &now, server_of).unwrap();
            check(&now, &again, first.k)?;
            prop_assert_eq!(again.tag, first.tag);
            let done = now.iter().filter(|list| list.settled).count();
            prop_assert_eq!(usize::from(again.settled), done);
            prop_assert!(done < 3 || again.undo.is_empty(), "nothing is undone twice");
        }
    }
}
