//! How far a stream reaches, which blocks are undone and which are listed, case by case.

use riopipe_order::attribute::{Attribute, Flags, GroupTag, Kind, Member, Seq, StreamId};
use riopipe_order::entry::Position;
use riopipe_order::recovery::{
    DecideError, DriveExtent, InPlace, ListedEntry, Redirected, StreamList, StreamPlan, decide,
    join,
};

use crate::{flush, merged, write, write_at};

const STREAM: StreamId = StreamId(3);

/// Members 0 and 1 are on server 0, members 2 and 3 on server 1.
fn server_of(member: Member) -> Option<u16> {
    (member.0 < 4).then_some(u16::from(member.0) / 2)
}

/// A server's list, each entry durable or not.
fn list(server: u16, released: u64, entries: &[(Attribute, bool)]) -> StreamList {
    let entry = |(at, &(attribute, durable)): (usize, &(Attribute, bool))| ListedEntry {
        position: Position(at as u64),
        attribute,
        incarnation: 1,
        persisted: durable,
        durable,
    };
    StreamList {
        in_doubt: false,
        server,
        released: Seq(released),
        newest_tag: GroupTag::new(Seq(released), !released),
        settled: false,
        entries: entries.iter().enumerate().map(entry).collect(),
    }
}

fn settled(server: u16, k: u64, entries: &[(Attribute, bool)]) -> StreamList {
    StreamList { settled: true, ..list(server, k, entries) }
}

fn plan(lists: &[StreamList]) -> StreamPlan {
    decide(STREAM, lists, server_of).unwrap()
}

fn extent(member: u8, lba: u64, blocks: u64) -> DriveExtent {
    DriveExtent { member: Member(member), lba, blocks }
}

/// A one-block write at its seq on a member.
fn on(seq: u64, member: u8) -> Attribute {
    write_at(seq, member, seq, 1)
}

/// One entry of a group of `num`.
fn part(seq: u64, index: u16, num: u16, member: u8) -> Attribute {
    Attribute { index, num, ..write_at(seq, member, 100 + u64::from(index), 1) }
}

#[test]
fn nothing_listed_is_nothing_to_undo() {
    let plan = plan(&[list(0, 7, &[]), list(1, 9, &[])]);
    assert!(plan.is_nothing());
    assert_eq!((plan.released, plan.k, plan.tag), (Seq(9), Seq(9), !9));
    assert_eq!((plan.kept, plan.dropped, plan.undone_blocks(), plan.settled), (0, 0, 0, 0));
    let none = decide(STREAM, &[], server_of).unwrap();
    assert_eq!((none.k, none.tag), (Seq::ZERO, 0), "a volume without logs");
}

#[test]
fn p1_the_prefix_ends_at_the_first_hole() {
    let a = list(0, 4, &[(on(5, 0), true), (on(7, 1), true)]);
    let b = list(1, 4, &[(on(6, 2), true), (on(8, 2), false), (on(9, 3), true)]);
    let found = plan(&[a.clone(), b.clone()]);
    assert_eq!((found.k, found.tag), (Seq(7), !7));
    assert_eq!((found.found, found.kept, found.dropped), (5, 3, 2));
    assert!(!found.is_nothing());
    assert_eq!(found.undo, [extent(2, 8, 1), extent(3, 9, 1)], "also what is durable beyond k");
    let mut hole = a;
    hole.entries.remove(0);
    let found = plan(&[hole, b]);
    assert_eq!((found.k, found.kept, found.dropped), (Seq(4), 0, 4));
    assert_eq!(found.undone_blocks(), 4);
}

#[test]
fn t1_the_largest_mark_counts() {
    // Server 1 knows that 6 was released. So the entries of server 0 up to there are not judged:
    // the flush that covered them may be gone from its log.
    let a = list(0, 2, &[(on(3, 0), false), (on(5, 1), false), (on(7, 0), true)]);
    let b = list(1, 6, &[]);
    let found = plan(&[a, b]);
    assert_eq!((found.released, found.k, found.kept), (Seq(6), Seq(7), 1));
    assert_eq!(found.undo, [], "nothing up to the mark is ever undone");
    assert_eq!(found.found, 3);
}

#[test]
fn t1_a_request_merged_across_the_mark_is_released_as_a_whole() {
    let a = list(0, 6, &[(merged(5, 4), false), (on(9, 0), true), (on(10, 0), false)]);
    let found = plan(&[a, list(1, 0, &[])]);
    assert_eq!(found.k, Seq(9));
    assert_eq!(found.undo, [extent(0, 10, 1)]);
}

#[test]
fn t6_a_group_counts_only_when_every_entry_is_there() {
    let two = [(part(5, 0, 3, 0), true), (part(5, 2, 3, 1), true)];
    let short = plan(&[list(0, 4, &two), list(1, 4, &[])]);
    assert_eq!((short.k, short.dropped), (Seq(4), 1));
    assert_eq!(short.undo, [extent(0, 100, 1), extent(1, 102, 1)]);
    let rest = [(part(5, 1, 3, 2), true)];
    assert_eq!(plan(&[list(0, 4, &two), list(1, 4, &rest)]).k, Seq(5));
    let undurable = [(part(5, 1, 3, 2), false)];
    assert_eq!(plan(&[list(0, 4, &two), list(1, 4, &undurable)]).k, Seq(4));
}

#[test]
fn t6_a_replayed_copy_is_one_entry_and_durable_if_either_is() {
    let copies = [(part(5, 0, 3, 0), true), (part(5, 2, 3, 1), true), (part(5, 0, 3, 0), true)];
    assert_eq!(plan(&[list(0, 4, &copies), list(1, 4, &[])]).k, Seq(4), "three logged, two there");
    for durable in [[false, true], [true, false]] {
        let again = Attribute { ordinal: 99, ..on(5, 0) };
        let a = list(0, 4, &[(on(5, 0), durable[0]), (again, durable[1])]);
        assert_eq!(plan(&[a, list(1, 4, &[])]).k, Seq(5));
    }
}

#[test]
fn t6_entries_that_cannot_both_be_true_are_refused() {
    let refused = |a: &[Attribute], b: &[Attribute], seq| {
        let entries = |list: &[Attribute]| list.iter().map(|a| (*a, false)).collect::<Vec<_>>();
        let lists = [list(0, 4, &entries(a)), list(1, 4, &entries(b))];
        let error = decide(STREAM, &lists, server_of).unwrap_err();
        assert_eq!(error, DecideError::Contradiction { stream: STREAM, seq: Seq(seq) });
        assert_eq!(error.stream(), STREAM);
    };
    refused(&[part(5, 0, 2, 0)], &[part(5, 1, 3, 2)], 5);
    refused(&[part(5, 0, 2, 0), Attribute { lba: 9, ..part(5, 0, 2, 0) }], &[], 5);
    refused(&[merged(5, 3)], &[on(7, 2)], 7);
    refused(&[merged(5, 3), merged(7, 2)], &[], 7);
    refused(&[merged(5, 3), merged(5, 2)], &[], 5);
    refused(&[on(9, 0)], &[Attribute { tag: 1, ..part(5, 0, 2, 2) }, part(5, 1, 2, 3)], 5);
    // Dead entries are not checked.
    let dead = [(part(3, 0, 2, 0), true), (part(3, 0, 3, 1), true)];
    assert_eq!(plan(&[list(0, 4, &dead), list(1, 4, &[])]).k, Seq(4));
}

#[test]
fn t19_an_entry_of_a_drive_that_is_elsewhere_is_refused() {
    for member in [2, 77] {
        let lists = [list(0, 4, &[(on(5, member), true)]), list(1, 4, &[])];
        let error = decide(STREAM, &lists, server_of).unwrap_err();
        assert_eq!(
            error,
            DecideError::WrongServer { stream: STREAM, seq: Seq(5), server: 0, member }
        );
    }
}

#[test]
fn p4_a_merged_request_is_there_wholly_or_not_at_all() {
    let a = |durable| list(0, 4, &[(merged(5, 3), durable), (on(8, 1), true)]);
    let found = plan(&[a(true), list(1, 4, &[])]);
    assert_eq!((found.k, found.kept, found.tag), (Seq(8), 4, !8));
    let found = plan(&[a(false), list(1, 4, &[])]);
    assert_eq!((found.k, found.dropped), (Seq(4), 4), "all of its groups are counted");
    assert_eq!(found.undo, [extent(0, merged(5, 3).lba, 3), extent(1, 8, 1)]);
}

#[test]
fn t11_in_place_updates_beyond_are_left_and_listed() {
    let in_place = |a: Attribute| Attribute { flags: a.flags.with(Flags::IN_PLACE), ..a };
    let a = [
        (in_place(on(5, 0)), true),
        (in_place(on(8, 1)), true),
        (on(9, 1), true),
        (in_place(write_at(10, 1, 9, 2)), false),
    ];
    let b = [(in_place(on(7, 3)), false)];
    let found = plan(&[list(0, 4, &a), list(1, 4, &b)]);
    assert_eq!(found.k, Seq(5), "an in-place group counts like any other");
    assert_eq!(found.undo, [extent(1, 9, 1)], "what a fresh write touched, too, is zeroed");
    let listed = [(7, extent(3, 7, 1)), (8, extent(1, 8, 1)), (10, extent(1, 9, 2))];
    assert_eq!(found.in_place, listed.map(|(seq, extent)| InPlace { seq: Seq(seq), extent }));
}

/// A redirected update of one block at its group's seq.
fn redirected(seq: u64, member: u8, lba: u64, prepared: u32) -> Attribute {
    let flags = Flags::BOUNDARY.with(Flags::IN_PLACE).with(Flags::REDIRECTED);
    Attribute { flags, ordinal: prepared, ..write_at(seq, member, lba, 1) }
}

fn copied(member: u8, lba: u64, blocks: u64, prepared_block: u32) -> Redirected {
    Redirected { home: extent(member, lba, blocks), prepared_block }
}

#[test]
fn redirected_updates_of_the_prefix_are_copied_home_and_the_others_are_forgotten() {
    // A1 → B2 → A3 on one block, and a home write under the first of them.
    let entries = |last_durable| {
        [
            (write_at(5, 0, 9, 1), true),
            (redirected(6, 0, 9, 0), true),
            (redirected(7, 1, 9, 0), true),
            (redirected(8, 0, 9, 1), last_durable),
        ]
    };
    let all = plan(&[list(0, 4, &entries(true)), list(1, 4, &[])]);
    assert_eq!((all.k, &all.in_place[..]), (Seq(8), &[][..]));
    assert_eq!(all.redirected, [copied(0, 9, 1, 1), copied(1, 9, 1, 0)], "the newest");
    let two = plan(&[list(0, 4, &entries(false)), list(1, 4, &[])]);
    assert_eq!((two.k, two.dropped), (Seq(7), 1));
    assert_eq!(two.redirected, [copied(0, 9, 1, 0), copied(1, 9, 1, 0)]);
    assert_eq!((&two.in_place[..], &two.undo[..]), (&[][..], &[][..]), "its home is as it was");
    // What is released is home, also where another log's mark shows it (T1).
    let released = plan(&[list(0, 4, &entries(false)), list(1, 6, &[])]);
    assert_eq!(released.redirected, [copied(1, 9, 1, 0)]);
    // An interrupted recovery has copied before it settled (T9).
    let settled = plan(&[settled(0, 7, &entries(false)[3..]), list(1, 4, &[])]);
    assert_eq!((settled.k, &settled.redirected[..]), (Seq(7), &[][..]));
}

#[test]
fn adjacent_blocks_are_copied_at_once() {
    let wide = Attribute { blocks: 4, ..redirected(5, 0, 20, 8) };
    let entries =
        [(wide, true), (redirected(6, 0, 22, 12), true), (redirected(7, 0, 24, 13), true)];
    let found = plan(&[list(0, 4, &entries), list(1, 4, &[])]);
    let expected =
        [copied(0, 20, 2, 8), copied(0, 22, 1, 12), copied(0, 23, 1, 11), copied(0, 24, 1, 13)];
    assert_eq!(found.redirected, expected);
}

#[test]
fn t26_durable_updates_are_copied_from_valid_logs_also_beyond_the_prefix() {
    let valid = list(0, 4, &[(redirected(6, 0, 9, 3), true), (redirected(7, 0, 10, 4), false)]);
    let lost = StreamList { in_doubt: true, ..list(1, 4, &[(redirected(5, 2, 9, 5), true)]) };
    let found = plan(&[valid, lost]);
    assert_eq!((found.k, found.log_given_up), (Seq(4), true));
    assert_eq!(found.redirected, [copied(0, 9, 1, 3)]);
    let listed: Vec<u64> = found.in_place.iter().map(|update| update.seq.0).collect();
    assert_eq!(listed, [5, 6, 7]);
}

#[test]
fn t11_extensions_beyond_are_left_and_not_listed() {
    let extend =
        |seq: u64, lba: u64| Attribute { flags: Flags::EXTEND, ..write_at(seq, 1, lba, 1) };
    let update = |seq: u64, lba: u64| Attribute { flags: Flags::IN_PLACE, ..extend(seq, lba) };
    let a = [
        (write_at(5, 1, 5, 1), true),
        // Over a base inside the prefix, once and again, whether they are durable or not.
        (extend(6, 5), false),
        (extend(7, 5), true),
        // Over a fresh one beyond it: zeroed with that.
        (write_at(8, 1, 8, 1), true),
        (extend(9, 8), true),
        // Over an in-place update, and under one: listed.
        (update(10, 20), true),
        (extend(11, 20), true),
        (extend(12, 22), true),
        (update(13, 22), true),
        // Over nothing that the log knows.
        (extend(14, 30), true),
    ];
    let found = plan(&[list(0, 4, &a), list(1, 4, &[])]);
    assert_eq!((found.k, found.dropped), (Seq(5), 9), "an extension is counted like any other");
    assert_eq!(found.undo, [extent(1, 8, 1)]);
    let listed = [(10, extent(1, 20, 1)), (13, extent(1, 22, 1))];
    assert_eq!(found.in_place, listed.map(|(seq, extent)| InPlace { seq: Seq(seq), extent }));
    assert_eq!(found.in_doubt, []);
    let whole = [(write_at(5, 1, 5, 1), true), (extend(6, 5), true)];
    assert_eq!(plan(&[list(0, 4, &whole), list(1, 4, &[])]).k, Seq(6));
}

#[test]
fn t11_an_extension_across_blocks_and_groups_is_one_by_one() {
    // Three blocks, of which a fresh write beyond the prefix touches the second.
    let extend = Attribute { flags: Flags::EXTEND, ..write_at(7, 0, 10, 3) };
    let found = plan(&[list(0, 4, &[(write_at(6, 0, 11, 1), true), (extend, true)])]);
    assert_eq!((found.k, found.undo, found.in_place), (Seq(4), vec![extent(0, 11, 1)], vec![]));
    // Merged over groups (T16): of none of them anything is undone or listed.
    let merged = Attribute { flags: Flags::EXTEND, ..merged(6, 3) };
    let found = plan(&[list(0, 4, &[(merged, true)])]);
    assert_eq!((found.k, found.dropped), (Seq(4), 3));
    assert_eq!((found.undo, found.in_place), (vec![], vec![]));
}

/// The log that was given up may have known of newer groups, and the content that an extension left
/// may be theirs.
#[test]
fn t26_extensions_beyond_are_in_doubt_when_a_log_is_given_up() {
    let extend = |seq: u64| Attribute { flags: Flags::EXTEND, ..write_at(seq, 0, 9, 1) };
    let good = list(0, 5, &[(extend(6), true), (extend(8), true)]);
    let lost = StreamList { in_doubt: true, ..list(1, 0, &[]) };
    let found = plan(&[good, lost]);
    assert_eq!((found.k, found.undo, found.in_place), (Seq(6), vec![], vec![]));
    assert_eq!(found.in_doubt, [InPlace { seq: Seq(8), extent: extent(0, 9, 1) }]);
}

#[test]
fn flush_entries_have_nothing_to_undo_and_discards_have() {
    let discard = Attribute { kind: Kind::Discard, ..on(6, 0) };
    let found = plan(&[list(0, 4, &[(discard, true), (flush(7, 1), true)]), list(1, 4, &[])]);
    assert_eq!((found.k, found.dropped), (Seq(4), 2));
    assert_eq!(found.undo, [extent(0, 6, 1)]);
}

#[test]
fn t9_a_settled_partition_reports_k_and_is_not_undone_again() {
    // The first recovery found 5 and settled server 0, which keeps its list. On server 1 the group
    // after it is still there, and whole by itself.
    let kept = Attribute { flags: Flags::IN_PLACE, ..on(7, 0) };
    let a = settled(0, 5, &[(kept, true), (on(8, 1), true)]);
    let b = list(1, 3, &[(on(6, 2), true), (on(9, 3), true)]);
    let found = plan(&[a, b]);
    assert_eq!((found.k, found.settled, found.tag), (Seq(5), 1, !5));
    assert_eq!(found.undo, [extent(2, 6, 1), extent(3, 9, 1)]);
    assert_eq!(found.in_place, [InPlace { seq: Seq(7), extent: extent(0, 7, 1) }]);
}

#[test]
fn t9_settlements_that_disagree_are_refused() {
    let refused = |lists: &[StreamList], k, other| {
        let (k, other) = (Seq(k), Seq(other));
        let error = decide(STREAM, lists, server_of).unwrap_err();
        assert_eq!(error, DecideError::Settled { stream: STREAM, k, other });
        assert_eq!(error.stream(), STREAM);
    };
    refused(&[settled(0, 5, &[]), settled(1, 6, &[])], 5, 6);
    refused(&[settled(0, 6, &[]), settled(1, 5, &[])], 6, 5);
    refused(&[settled(0, 5, &[]), list(1, 6, &[])], 5, 6);
    assert_eq!(plan(&[settled(0, 5, &[]), list(1, 4, &[])]).k, Seq(5));
    assert_eq!(plan(&[settled(0, 5, &[]), list(1, 5, &[])]).k, Seq(5));
}

#[test]
fn the_tag_is_that_of_the_newest_group_kept() {
    let mark = |mut list: StreamList, seq: u64, tag: u64| {
        list.newest_tag = GroupTag::new(Seq(seq), tag);
        list
    };
    // Server 0 never saw group 6; server 1 has dropped it, and remembers.
    let lists = [mark(list(0, 6, &[]), 3, 33), mark(list(1, 6, &[]), 6, 66)];
    assert_eq!(plan(&lists).tag, 66);
    // A server that lags behind the mark still has it in its list.
    let lists = [mark(list(0, 2, &[(write(3), false)]), 2, 22), mark(list(1, 3, &[]), 1, 11)];
    assert_eq!(plan(&lists).tag, write(3).tag);
    // A dropped group has no effect.
    let lists = [mark(list(0, 2, &[(write(3), false)]), 2, 22), mark(list(1, 0, &[]), 0, 0)];
    assert_eq!(plan(&lists).tag, 22);
}

#[test]
fn adjacent_extents_are_joined_and_others_not() {
    let joined = join(vec![
        extent(1, 5, 2),
        extent(0, 8, 1),
        extent(0, 0, 4),
        extent(0, 4, 1),
        extent(0, 1, 2),
        extent(0, 6, 2),
    ]);
    assert_eq!(joined, [extent(0, 0, 5), extent(0, 6, 3), extent(1, 5, 2)]);
    assert_eq!(join(vec![]), []);
}

/// An older log may have been settled in its own time, which proves nothing about the groups since.
#[test]
fn t26_an_older_log_that_is_given_up_contributes_no_tag_of_another_history() {
    let good = StreamList { newest_tag: GroupTag::new(Seq(6), 66), ..list(0, 9, &[]) };
    let older = StreamList { in_doubt: true, ..list(1, 6, &[(on(6, 1), true), (on(9, 1), true)]) };
    let older = StreamList { newest_tag: GroupTag::new(Seq(5), 55), ..older };
    let found = plan(&[good, older]);
    assert_eq!((found.k, found.tag), (Seq(9), 66), "not that of group 9 of the older log");
}

#[test]
fn t26_an_older_log_that_was_settled_does_not_end_the_prefix() {
    let good = list(0, 5, &[(on(6, 0), true), (on(7, 1), true), (on(8, 0), false)]);
    let older = |settled| StreamList { in_doubt: true, settled, ..list(1, 3, &[]) };
    for was_settled in [false, true] {
        let plan = plan(&[good.clone(), older(was_settled)]);
        assert_eq!((plan.k, plan.undone_blocks()), (Seq(7), 0), "settled: {was_settled}");
    }
}
