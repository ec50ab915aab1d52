//! Test-only switches and counters, compiled in by the feature `probe` (the simulator's).
//!
//! - A [`Plant`] removes the defence of one trap. The simulator's oracle must then report a broken
//!   promise. At most one is set in a process.
//! - A [`Rare`] counts a path that is seldom taken. The simulator fails when one was never taken.
//!
//! Without the feature, [`is_bug_planted`] is constantly false and [`count_rare`] does nothing: not
//! an instruction is left of either.

macro_rules! named {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$doc])* $variant,)*
        }

        impl $name {
            /// All variants.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name on the command line and in reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }

            /// The variant with this name, if there is one.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|it| it.name() == name)
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

named! {
    /// A plant: the removed defence of a trap.
    Plant {
        /// The initiator releases groups that are complete but not durable.
        T1ReleaseUndurable = "T1-release-undurable",
        /// The target reuses a slot before the mark that frees it is durable.
        T1ReuseBeforeMark = "T1-reuse-before-mark",
        /// Recovery starts at the smallest released mark among the servers, not the largest.
        T1SmallestMark = "T1-smallest-mark",
        /// An idle stream sends targets a mark up to its last group, durable or not.
        T1IdleMarkEarly = "T1-idle-mark-early",
        /// A stream that its owner has left is not flushed in the background.
        T1NoBackgroundFlush = "T1-no-background-flush",
        /// A volume is closed without sending the targets how far its streams are.
        T1CloseWithoutMark = "T1-close-without-mark",
        /// A FLUSH is issued without waiting for the stream's earlier writes there.
        T2FlushEarly = "T2-flush-early",
        /// A joint FLUSH reaches only the drives that its own group writes.
        T3OwnDrivesOnly = "T3-own-drives-only",
        /// The flush entries of a joint FLUSH are not counted in the group.
        T3NotCounted = "T3-not-counted",
        /// A flushed entry covers entries on other drives, too.
        T4CoverOtherDrive = "T4-cover-other-drive",
        /// After a target's crash only requests that were not complete are replayed.
        T4ReplayIncompleteOnly = "T4-replay-incomplete-only",
        /// A flush behind a failed write completes, and covers it.
        T4CoverAfterFailure = "T4-cover-after-failure",
        /// Wire numbers are not widened next to the last seq: the upper half is taken as zero.
        T5NotWidened = "T5-not-widened",
        /// A group counts as whole without all of its entries.
        T6IgnoreNum = "T6-ignore-num",
        /// Entries are counted, not distinct ones; and replays are logged again.
        T6CountTwice = "T6-count-twice",
        /// A torn entry is used: its checksum is not checked.
        T7NoChecksum = "T7-no-checksum",
        /// Any persist word that is not zero counts, also one of an older lap.
        T7AnyPersistWord = "T7-any-persist-word",
        /// A resumed log keeps persist words of older laps.
        T7InvalidWordKept = "T7-invalid-word-kept",
        /// A resumed log is not cut at its first hole.
        T7NoCut = "T7-no-cut",
        /// The completion is sent before the persist word is durable.
        T7AnswerBeforeFence = "T7-answer-before-fence",
        /// Of several completions that a stream gets at once, the answers are sent before the
        /// persist words are durable.
        T7BatchBeforeFence = "T7-batch-before-fence",
        /// A target started again uses bytes that its last incarnation stored and never fenced.
        T7UseUnfenced = "T7-use-unfenced",
        /// The write goes to the drive before its attribute is durable.
        T7WriteBeforeFence = "T7-write-before-fence",
        /// A fence of a log on a block device does not wait for its writes: the next one writes
        /// their blocks again while they are in flight.
        M4LogBlockInFlight = "M4-log-block-in-flight",
        /// A claim does not wait for the old owner's writes in flight.
        T8ClaimNoWait = "T8-claim-no-wait",
        /// A fenced owner's requests are still carried out.
        T8StaleOwner = "T8-stale-owner",
        /// A fenced owner's reads are still answered, with the content after recovery.
        T8FencedReads = "T8-fenced-reads",
        /// A read was in flight when its owner was fenced, and no fence waits for it. It is
        /// answered with the content after recovery, or with that of the next owner.
        T8LateReads = "T8-late-reads",
        /// An association has ended, perhaps after another owner had taken its volume over. Until
        /// its queues end, they still read, also what the next owner writes.
        T8EndedReads = "T8-ended-reads",
        /// Replay starts before the writes of the first copy have come back.
        T8ReplayNoWait = "T8-replay-no-wait",
        /// A recovery that is started again does not wait for the zeroing of the last attempt.
        T8UndoNoWait = "T8-undo-no-wait",
        /// Once a volume is free, a fenced owner of it may write as any other plain host.
        T8FencedPlain = "T8-fenced-plain",
        /// A restarted target serves a drive while writes of its former incarnation are in flight.
        T8ServeNoWait = "T8-serve-no-wait",
        /// A message between two cores of a target is lost. It would have informed a core that
        /// something was left for a connection.
        T8NoticeLost = "T8-notice-lost",
        /// Logs are settled before undo is done everywhere.
        T9SettleEarly = "T9-settle-early",
        /// The undo is not flushed before logs are settled.
        T9UndoNotFlushed = "T9-undo-not-flushed",
        /// A stream restarts before all logs are settled.
        T9RestartEarly = "T9-restart-early",
        /// A mark that is only in a target's memory counts as recovered.
        T9MarkInMemory = "T9-mark-in-memory",
        /// In-place lists are dropped without having been acknowledged.
        T9ForgetInPlace = "T9-forget-in-place",
        /// Undo deallocates, although deallocated blocks may read as anything.
        T10Deallocate = "T10-deallocate",
        /// Undo zeroes in-place updates, too.
        T11UndoInPlace = "T11-undo-in-place",
        /// In-place updates beyond k are not listed.
        T11NotListed = "T11-not-listed",
        /// Undo zeroes extensions, too.
        T11UndoExtensions = "T11-undo-extensions",
        /// Extensions beyond k are listed, as in-place updates are.
        T11ListExtensions = "T11-list-extensions",
        /// A write does not wait for an earlier one to the same block.
        T12NoOverlap = "T12-no-overlap",
        /// A durable write does not cover an earlier one to the same block.
        T12NoOverlapCover = "T12-no-overlap-cover",
        /// Groups are admitted without checking the log's free slots.
        T13NoCredits = "T13-no-credits",
        /// No slots are kept for the flush that frees space.
        T13NoReserve = "T13-no-reserve",
        /// Payload is forgotten when it is complete, not when it is durable.
        T14ForgetEarly = "T14-forget-early",
        /// The replay memory is not bounded.
        T14Unbounded = "T14-unbounded",
        /// The caller reuses blocks of one stream in another before the first is released.
        T15ReuseEarly = "T15-reuse-early",
        /// Requests are merged over gaps between their blocks.
        T16MergeGaps = "T16-merge-gaps",
        /// Writes of different places are merged: fresh, in place, extensions.
        T16MergePlaces = "T16-merge-places",
        /// A target that does not report the extension is taken to have it.
        T17AssumeExtension = "T17-assume-extension",
        /// Engine `rio` is run on every target, with or without the extension.
        T17NoFallback = "T17-no-fallback",
        /// A volume falls back to an engine that keeps no order.
        T17FallbackUnordered = "T17-fallback-unordered",
        /// An initiator that has not claimed a volume may have its log forgotten.
        T18AnyoneForgets = "T18-anyone-forgets",
        /// A log region's header is used although its checksum is wrong.
        T19HeaderUnchecked = "T19-header-unchecked",
        /// A partition's marks are used although their checksums are wrong.
        T19MarkUnchecked = "T19-mark-unchecked",
        /// Another stream's partition is used.
        T19ForeignPartition = "T19-foreign-partition",
        /// A blank log where one is due is taken for nothing to undo.
        T19BlankLog = "T19-blank-log",
        /// The volume in a drive's label is not compared with the volume that is opened.
        T19OtherVolume = "T19-other-volume",
        /// A label of a newer version is read as if it were of this one.
        T19NewerLabel = "T19-newer-label",
        /// Recovery goes on without the lists of one server.
        T20MissingServer = "T20-missing-server",
        /// A plain host may write members of an unrecovered volume.
        T21NoGuard = "T21-no-guard",
        /// A stream's own failed FLUSH does not stop it.
        T22OwnFlush = "T22-own-flush",
        /// A failed FLUSH does not reach other streams with unflushed writes on the drive.
        T22OtherStreams = "T22-other-streams",
        /// A plain FLUSH succeeds although one that failed since has lost writes that it covers.
        T22PlainFlush = "T22-plain-flush",
        /// A drive that comes back without power-loss protection is taken to have it still.
        T27AssumeProtection = "T27-assume-protection",
        /// A stream's connection that is being made when its association ends is made all the same.
        T27LateConnect = "T27-late-connect",
        /// Volumes without a log are never forgotten.
        T28RememberAll = "T28-remember-all",
        /// The owner of a volume that was forgotten resumes, although another owner may have had it
        /// since.
        T28ForgottenResumes = "T28-forgotten-resumes",
        /// A lease of any length is granted.
        T28AnyLease = "T28-any-lease",
        /// A log of records confirms what is complete, not what is durable.
        W1ConfirmComplete = "W1-confirm-complete",
        /// A record that a crash has cut is finished by the bytes of the next opening: neither the
        /// epoch of their blocks nor the record's checksum is checked.
        W2TornRecord = "W2-torn-record",
        /// A block of a log of records is written again before the trim that frees it is released.
        W3FreeEarly = "W3-free-early",
        /// A block that an earlier lap left in the ring is taken for the next block of the log.
        W4OldLap = "W4-old-lap",
        /// A checkpoint counts as soon as its first byte is in a block, not its last one.
        W5CheckpointEarly = "W5-checkpoint-early",
        /// A torn block of a log of records is read: its checksum is not checked.
        W6TornBlock = "W6-torn-block",
        /// Blocks of a log of records that are perhaps only in a cache are not written again.
        W7NotSettled = "W7-not-settled",
        /// A FLUSH's success is used although another's failure may not be known yet.
        T29AcceptAtOnce = "T29-accept-at-once",
        /// A failed write does not stop its stream at the target.
        T22FailedWrite = "T22-failed-write",
        /// The answers to an abandoned attempt to recover are taken for the next one's.
        T23LateAnswers = "T23-late-answers",
        /// A group that no list shows ends no prefix.
        P1SkipGap = "P1-skip-gap",
        /// With a log given up, fresh blocks beyond the prefix are undone on the other targets.
        T26UndoInDoubt = "T26-undo-in-doubt",
        /// A log's generation is not compared with the labels'.
        T24LabelUnchecked = "T24-label-unchecked",
        /// A mapped log of another boot is used without having been synced cleanly.
        T24StampUnchecked = "T24-stamp-unchecked",
        /// A mapped log is stamped as synced before all of it is written back.
        T24StampEarly = "T24-stamp-early",
        /// A mapped log keeps its stamp while it is served.
        T24StampKept = "T24-stamp-kept",
        /// An owner's lease ends with its connection.
        T25LeaseWithConnection = "T25-lease-with-connection",
        /// The guard against plain hosts ends with the owner's connection.
        T25GuardWithConnection = "T25-guard-with-connection",
        /// An owner that closes its volume claims it again on a target that has released it.
        T25ClaimedAgain = "T25-claimed-again",
        /// The guard opens while operations of an earlier owner are in flight, if its successor has
        /// ended before its claim had waited for them.
        T21EarlierOwnerForgotten = "T21-earlier-owner-forgotten",
        /// Completions are delivered as they come, not in group order.
        P3AnyOrder = "P3-any-order",
        /// A lost connection poisons its stream at once.
        P7GiveUpAtOnce = "P7-give-up-at-once",
        /// A request that the target's list shows durable is sent again all the same.
        P7ReplayDurable = "P7-replay-durable",
        /// A binding that found the target busy is not tried again.
        P8BusyForEver = "P8-busy-for-ever",
        /// A Keep Alive without an answer counts as answered.
        P8KeepAliveUnanswered = "P8-keep-alive-unanswered",
        /// A target that is unreachable is not tried again.
        P8NeverAgain = "P8-never-again",
        /// The background driver takes over no stream whose owner does not call.
        P8OwnerNotCalling = "P8-owner-not-calling",
        /// A thread that begins to wait for a mark does not check whether it is reached already.
        P8WaiterNotChecked = "P8-waiter-not-checked",
        /// Threads that wait for a mark do not learn that their stream has failed.
        P8WaiterNotWoken = "P8-waiter-not-woken",
        /// The background driver leaves a stream for which other threads wait to its owner,
        /// although the owner is not calling.
        P8AwaitedLeft = "P8-awaited-left",
        /// A durable group is not sent before the owner's next call.
        P8DurableUnsent = "P8-durable-unsent",
        /// A read does not wait for the stream's own writes.
        P9OwnReads = "P9-own-reads",
        /// Reads do not wait for replays.
        P9ReadsRaceReplay = "P9-reads-race-replay",
        /// Engine `sync` sends the next group before the FLUSH of the one before.
        SyncNoFlush = "sync-no-flush",
        /// Engine `sync` sends the next group before the one before is complete.
        SyncNextEarly = "sync-next-early",
        /// Engine `linux` sends a PREFLUSH to one of the drives that need it only.
        LinuxPreflushOneDrive = "linux-preflush-one-drive",
        /// Engine `linux` sends the commit block of a group before its other writes have ended.
        LinuxCommitEarly = "linux-commit-early",
        /// Engine `linux` sends the commit block of a group without FUA.
        LinuxNoFua = "linux-no-fua",
        /// Engine `linux` sends the next group without a FLUSH for the groups before it.
        LinuxNoFlushBetween = "linux-no-flush-between",
        /// Engine `horae` sends the data of a group without waiting for its metadata.
        HoraeDataBeforeMetadata = "horae-data-before-metadata",
        /// A joint FLUSH of engine `horae` misses drives.
        HoraeFlushMissesDrive = "horae-flush-misses-drive",
        /// Engine `horae` records `flushed` before the FLUSHes have ended.
        HoraeFlushedEarly = "horae-flushed-early",
        /// A target confirms ordering metadata before it is durable in the log.
        HoraeConfirmedEarly = "horae-confirmed-early",
        /// Ordered requests are taken in although a barrier has not left.
        EpochNotBlocked = "epoch-not-blocked",
        /// The barrier is the request that came as one, not the last one to leave.
        BarrierNotReassigned = "barrier-not-reassigned",
        /// All that has waited is taken in at once, not one epoch.
        EpochsMixed = "epochs-mixed",
        /// Engine `barrier` sends a group for another drive without waiting for those before it.
        BarrierNoSwitch = "barrier-no-switch",
        /// A target submits an ordered write although the data of an earlier one has not come.
        ArrivalPassesBarrier = "arrival-passes-barrier",
        /// A target takes further ordered writes of a connection after one has failed.
        ArrivalNotStopped = "arrival-not-stopped",
        /// Engine `opimq` sends a write into the queue of its core, not into that of its epoch.
        OpimqNotPinned = "opimq-not-pinned",
        /// Engine `opimq` sends two writes of the same block in one epoch.
        OpimqOverlapInEpoch = "opimq-overlap-in-epoch",
        /// Engine `opimq` sends a group for another drive while the groups before it are not
        /// durable.
        OpimqSwitchEarly = "opimq-switch-early",
        /// Engine `opimq` sends a discard among ordered writes.
        OpimqDiscardEarly = "opimq-discard-early",
        /// Engine `opimq` reports groups as durable that are only complete.
        OpimqNoFlush = "opimq-no-flush",
        /// A target does not begin a stream of a drive anew before another host gets it.
        OpimqStreamNotBegun = "opimq-stream-not-begun",
        /// Engine `horae` reads redirected blocks from their home.
        HoraeReadHome = "horae-read-home",
        /// A reader does not notice that a drive has lost redirected updates of engine `horae`.
        HoraeReadLost = "horae-read-lost",
        /// Engine `horae` does not record `flushed` where redirected updates keep a log's entries.
        HoraeFlushedForgotten = "horae-flushed-forgotten",
        /// Engine `horae` writes updates home that no joint FLUSH has covered.
        HoraeHomeUnflushed = "horae-home-unflushed",
        /// Engine `horae` releases redirected updates before they are durable at home.
        HoraeReleasedEarly = "horae-released-early",
        /// Of several redirected updates of a block, engine `horae` writes the oldest one home.
        HoraeOlderCommitted = "horae-older-committed",
        /// Of several redirected updates of a block, recovery copies the oldest one home.
        HoraeOlderCopied = "horae-older-copied",
        /// Recovery copies no redirected update home.
        HoraeNotCopied = "horae-not-copied",
        /// If a log was given up, recovery copies no redirected update home, on any drive.
        HoraeNotCopiedInDoubt = "horae-not-copied-in-doubt",
        /// Engine `horae` uses blocks of the prepare area again while they are being read.
        HoraeAreaReusedEarly = "horae-area-reused-early",
        /// Engine `opimq` sends a dual-stream write with its own stream only.
        OpimqFollowerNotNamed = "opimq-follower-not-named",
        /// The follower's next group has the epoch of the dual-stream write, so it is not behind it.
        OpimqFollowerNotBehind = "opimq-follower-not-behind",
        /// Two dual-stream writes have opposite orders in their two streams.
        OpimqSiblingsCrossed = "opimq-siblings-crossed",
        /// A follower sends a group for another drive, or one that is sent apart, while a write that
        /// it follows is not durable.
        OpimqFollowedNotFlushed = "opimq-followed-not-flushed",
        /// A dual-stream write is behind a FLUSH of its stream.
        OpimqDualBehindFlush = "opimq-dual-behind-flush",
        /// A stream names a follower that the drive's target does not know yet.
        OpimqFollowerUnknown = "opimq-follower-unknown",
        /// A group that a stream can't follow in the drive is not waited for.
        FollowNotWaited = "follow-not-waited",
        /// No thread drives a stream whose owner is not calling, although another stream waits for
        /// what it has not sent.
        FollowNotDriven = "follow-not-driven",
        /// A stream goes on although a stream that it follows has failed.
        FollowFailureIgnored = "follow-failure-ignored",
        /// Engine `none` reports groups as durable that are only complete.
        NoneNoFlush = "none-no-flush",
        /// Replays do not wait for reads.
        P9ReplayRacesReads = "P9-replay-races-reads",
    }
}

named! {
    /// A plant of the host's half of an order that drives keep ([`dispatch`](crate::dispatch)). The
    /// oracles of `tests/dispatch` must notice it.
    DispatchPlant {
        /// A write goes into the queue of its core, not of its epoch.
        EpochNotPinned = "epoch-not-pinned",
        /// The follower's next epoch has the number of the dual-stream write.
        FollowerNotCounted = "follower-not-counted",
    }
}

named! {
    /// A plant of an ordered volume as a plain block device: the removed defence. The simulator's
    /// device user must notice it.
    DevicePlant {
        /// A flush asks only the first stream that needs it.
        FlushOneStream = "flush-one-stream",
        /// A flush is done at once.
        FlushAtOnce = "flush-at-once",
        /// A flush covers one group less than what was complete.
        FlushOneLess = "flush-one-less",
        /// A write with FUA is done when it is complete.
        FuaWhenComplete = "fua-when-complete",
        /// A write with FUA is done when the flush that was in flight before it is.
        FuaSharesEarlierFlush = "fua-shares-earlier-flush",
        /// No flush follows the writes with FUA that were submitted while one was in flight.
        FuaNotFlushed = "fua-not-flushed",
        /// A request is done when the first of its parts is.
        DoneWithFirstPart = "done-with-first-part",
        /// Zeroes do not wait until older writes to their blocks are released (trap T11).
        ZeroesNotAwaitRelease = "zeroes-not-await-release",
        /// A write does not wait until older zeroes of its blocks are released.
        WriteNotAwaitsZeroes = "write-not-awaits-zeroes",
        /// A request does not wait until older ones have queued their parts for its blocks (trap T8).
        OvertakesOlder = "overtakes-older",
        /// A part for which there was no space goes behind the later ones (trap T12).
        FullPartToBack = "full-part-to-back",
        /// A part for which there was no space is not tried again (trap T13).
        FullForEver = "full-for-ever",
        /// A stream whose part need not wait for a release any more is not woken (promise P8).
        UnblockedNotWoken = "unblocked-not-woken",
        /// Blocks pass from one stream to another with each request (trap T15).
        BlocksChangeStream = "blocks-change-stream",
        /// The failure of a stream ends the requests, and is forgotten then (promise P6).
        FailureForgotten = "failure-forgotten",
        /// After a failure, blocks are read whose newest content may be lost.
        ReadsInDoubt = "reads-in-doubt",
        /// An engine that rolls complete writes back confirms them.
        RolledBack = "rolled-back",
    }
}

named! {
    /// A path that is seldom taken.
    Rare {
        /// Recovery zeroed blocks beyond the prefix of a stream.
        Undo = "undo",
        /// A request was sent again after a lost connection.
        Replay = "replay",
        /// A replayed request was complete before, but not durable.
        ReplayComplete = "replay-of-complete",
        /// A completion was lost with its connection, and the list of the log showed that the write was
        /// durable.
        CompletionFromList = "completion-from-list",
        /// A replayed entry was found in the log and not appended again.
        Adopted = "adopted-entry",
        /// A torn entry was found.
        TornEntry = "torn-entry",
        /// A slot had a whole entry of an older lap of the ring, or of an older generation.
        StaleEntry = "stale-entry",
        /// A slot had the persist word of an entry that an older lap of the ring had left.
        InvalidPersist = "invalid-persist-word",
        /// A log had a hole among its live entries, and was cut there.
        Cut = "cut",
        /// The gate held an entry that overtook its predecessors.
        GateEarly = "gate-early",
        /// The gate held a write that overlaps one in flight.
        GateOverlap = "gate-overlap",
        /// The gate held a FLUSH for earlier writes.
        GateFlush = "gate-flush",
        /// A group was refused because a log was full.
        LogFull = "log-full",
        /// A group was refused because the replay memory was full.
        MemoryFull = "memory-full",
        /// The engine put in a flush of its own.
        ForcedFlush = "forced-flush",
        /// A mark was written to free space in the log.
        MarkForSpace = "mark-for-space",
        /// An idle stream sent its released mark in a command of its own.
        IdleMark = "idle-mark",
        /// The background driver flushed a stream that its owner had left.
        BackgroundFlush = "background-flush",
        /// The claim of a new owner waited for the device operations of the former owner.
        FenceWaited = "fence-waited",
        /// A former owner got the answer that it is fenced.
        FencedOwner = "fenced-owner",
        /// A binding waited for the old connection's operations.
        BindWaited = "bind-waited",
        /// A connection was moved from one core of a target to another.
        HandedOver = "handed-over",
        /// The data of a command arrived in parts, and went straight to the command's buffer.
        DataInParts = "data-in-parts",
        /// Several completions of one stream waited for the same fence of the log.
        FenceShared = "fence-shared",
        /// An operation waited because its drive had the most operations that it takes at once.
        DriveFull = "drive-full",
        /// A drive finished a write after the process that issued it had died.
        LateWrite = "late-write",
        /// A crash came during a recovery.
        CrashInRecovery = "crash-in-recovery",
        /// A crash came during a replay.
        CrashInReplay = "crash-in-replay",
        /// Recovery found a partition that an earlier, interrupted recovery had settled.
        SettledBefore = "settled-before",
        /// The number of a group passed 2^32. Commands carry only its lower bits.
        SeqWrap = "seq-wrap",
        /// The ring of a log came around.
        LogLap = "log-lap",
        /// A group had entries on several servers.
        GroupAcrossServers = "group-across-servers",
        /// A write was split.
        Split = "split",
        /// Writes of one group were merged.
        MergedInGroup = "merged-in-group",
        /// Whole groups were merged.
        MergedGroups = "merged-groups",
        /// Recovery listed an in-place update beyond the prefix.
        InPlaceListed = "in-place-listed",
        /// Recovery left an extension beyond the prefix as it was.
        ExtensionLeft = "extension-left",
        /// Recovery found a group beyond the prefix with all its entries.
        WholeBeyondK = "whole-beyond-k",
        /// A group was found with some entries missing.
        PartialGroup = "partial-group",
        /// An entry without a persist word was durable by a later flush.
        CoveredByFlush = "covered-by-flush",
        /// An entry without a persist word was durable by a later overlapping write.
        CoveredByOverlap = "covered-by-overlap",
        /// A stream was poisoned by its own failed write.
        WriteFailed = "write-failed",
        /// A stream was poisoned by its own failed FLUSH.
        FlushFailed = "flush-failed",
        /// A stream was poisoned by another's failed FLUSH.
        FlushFailedElsewhere = "flush-failed-elsewhere",
        /// A FLUSH succeeded while another was in flight, and waited for that.
        FlushInDoubt = "flush-in-doubt",
        /// A target came back changed, and was refused.
        Changed = "changed-target",
        /// A poisoned stream was reopened.
        Reopened = "reopened",
        /// A log's fence failed.
        LogFailed = "log-failed",
        /// A lost, blank or foreign log was refused.
        LogRefused = "log-refused",
        /// A log was refused because it was older than the labels.
        LogBehind = "log-behind",
        /// Recovery was refused because a member was missing.
        MemberMissing = "member-missing",
        /// A plain host was kept from a guarded drive.
        Guarded = "guarded",
        /// A volume was freed because its owner's lease had run out.
        LeaseOver = "lease-over",
        /// An initiator gave up a target for good.
        GivenUp = "given-up",
        /// A log was given up.
        LogGivenUp = "log-given-up",
        /// A stream was recovered although one of its logs had been given up.
        LogInDoubt = "log-in-doubt",
        /// Engine `linux` sent FLUSHes between two groups.
        LinuxFlushBetween = "linux-flush-between",
        /// Engine `linux` sent the commit block of a group.
        LinuxCommit = "linux-commit",
        /// A joint FLUSH of engine `horae` went to several drives.
        HoraeJointFlush = "horae-joint-flush",
        /// Data of engine `horae` waited for earlier data of the same blocks.
        HoraeOverlap = "horae-overlap",
        /// Engine `barrier` went on to another drive, after all groups before were durable.
        BarrierSwitch = "barrier-switch",
        /// A target held an ordered write whose data was there, because of an earlier one.
        ArrivalHeld = "arrival-held",
        /// A drive with a cache barrier began a new sequence of epochs after a failed write.
        SequenceBegun = "sequence-begun",
        /// A write without an order went to a drive with a cache barrier, past ordered writes that
        /// were in flight.
        OrderlessCrossed = "orderless-crossed",
        /// A write of engine `opimq` went into the queue of its epoch, although its stream had moved
        /// to the core of another queue.
        OpimqPinned = "opimq-pinned",
        /// A group of engine `opimq` had two writes of the same block.
        OpimqOverlap = "opimq-overlap",
        /// A group of engine `opimq` waited until the groups before it were durable.
        OpimqSwitch = "opimq-switch",
        /// A drive began a stream anew, because the last host that used it had left.
        OpimqStreamBegun = "opimq-stream-begun",
        /// Engine `horae` wrote redirected updates home.
        HoraeCommit = "horae-commit",
        /// A group did not fit into the prepare area now.
        PrepareAreaFull = "prepare-area-full",
        /// Blocks of the prepare area waited for reads before they were used again.
        PrepareAreaRead = "prepare-area-read",
        /// A read found some of its blocks in the prepare area.
        RedirectedRead = "redirected-read",
        /// An ordered write waited for the sequence that another connection starts or ends.
        SequenceAwaited = "sequence-awaited",
        /// A read found that a drive had lost a redirected update.
        RedirectedLost = "redirected-lost",
        /// The place of a read is found again, because a stream of engine `horae` has failed meanwhile.
        ReadPlacedAgain = "read-placed-again",
        /// Redirected updates are written home in time, without a need for space.
        HomeInTime = "home-in-time",
        /// Recovery copied redirected updates home.
        RedirectedCopied = "redirected-copied",
        /// Engine `opimq` sent a dual-stream write.
        OpimqDual = "opimq-dual",
        /// A dual-stream write was more than one epoch.
        OpimqDualOverlap = "opimq-dual-overlap",
        /// A stream made a write durable that it follows before it went on to another drive, or with
        /// a group that is sent apart.
        OpimqFollowedFlush = "opimq-followed-flush",
        /// A stream waited until a group of another stream was durable that it follows.
        FollowWaited = "follow-waited",
        /// A stream failed because a stream with which it shares a group had failed.
        FollowFailed = "follow-failed",
        /// A volume fell back to engine `sync`, since a target could not run `rio`.
        FellBack = "fell-back",
        /// A volume without a log was forgotten to free its place for another.
        Forgotten = "forgotten-volume",
        /// The present drives did not make up the volume.
        DrivesRefused = "drives-refused",
        /// A log of records was opened whose last record a crash had cut.
        RecordCut = "record-cut",
        /// A log of records was opened after its ring had been filled more than once.
        RecordsLapped = "records-lapped",
        /// Blocks of a log of records that were perhaps only in a cache were written again.
        RecordsSettled = "records-settled",
        /// Records waited for space in a full log of records.
        RecordsFull = "records-full",
        /// An answer to an abandoned attempt to recover came during a later one.
        LateAnswer = "late-answer",
    }
}

#[cfg(feature = "probe")]
mod state {
    use super::{DevicePlant, DispatchPlant, Plant, Rare};
    use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    /// Index of the planted bug of the dispatch plus one; 0 for none.
    static DISPATCH_PLANTED: AtomicU32 = AtomicU32::new(0);

    /// Whether this bug is planted.
    #[must_use]
    #[inline]
    pub fn is_dispatch_bug_planted(plant: DispatchPlant) -> bool {
        DISPATCH_PLANTED.load(Ordering::Relaxed) == plant as u32 + 1
    }

    /// Plants a bug of the dispatch in this process, or takes it out again.
    pub fn plant_in_dispatch(plant: Option<DispatchPlant>) {
        DISPATCH_PLANTED.store(plant.map_or(0, |plant| plant as u32 + 1), Ordering::Relaxed);
    }

    /// Index of the planted bug of the plain device plus one; 0 for none.
    static DEVICE_PLANTED: AtomicU32 = AtomicU32::new(0);

    /// Whether this bug is planted.
    #[must_use]
    #[inline]
    pub fn is_device_bug_planted(plant: DevicePlant) -> bool {
        DEVICE_PLANTED.load(Ordering::Relaxed) == plant as u32 + 1
    }

    /// Whether any bug of the plain device is planted.
    #[must_use]
    pub fn is_any_device_bug_planted() -> bool {
        DEVICE_PLANTED.load(Ordering::Relaxed) != 0
    }

    /// Plants a bug of the plain device in this process, or takes it out again.
    pub fn plant_in_device(plant: Option<DevicePlant>) {
        DEVICE_PLANTED.store(plant.map_or(0, |plant| plant as u32 + 1), Ordering::Relaxed);
    }

    /// Index of the planted bug plus one; 0 for none.
    static PLANTED: AtomicU32 = AtomicU32::new(0);
    static COUNTS: [AtomicU64; Rare::ALL.len()] = [const { AtomicU64::new(0) }; Rare::ALL.len()];

    /// Whether this bug is planted.
    #[must_use]
    #[inline]
    pub fn is_bug_planted(plant: Plant) -> bool {
        PLANTED.load(Ordering::Relaxed) == plant as u32 + 1
    }

    /// Plants a bug in this process, or takes it out again.
    pub fn plant(plant: Option<Plant>) {
        PLANTED.store(plant.map_or(0, |plant| plant as u32 + 1), Ordering::Relaxed);
    }

    /// Counts one passage of a rare path.
    #[inline]
    pub fn count_rare(rare: Rare) {
        COUNTS[rare as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How often each rare path was taken in this process, in the order of [`Rare::ALL`].
    #[must_use]
    pub fn counts() -> [u64; Rare::ALL.len()] {
        core::array::from_fn(|i| COUNTS[i].load(Ordering::Relaxed))
    }
}

#[cfg(not(feature = "probe"))]
mod state {
    use super::{DevicePlant, DispatchPlant, Plant, Rare};

    /// Whether this bug is planted: never, without the feature `probe`.
    #[must_use]
    #[inline(always)]
    pub const fn is_device_bug_planted(_: DevicePlant) -> bool {
        false
    }

    /// Whether this bug is planted: never, without the feature `probe`.
    #[must_use]
    #[inline(always)]
    pub const fn is_dispatch_bug_planted(_: DispatchPlant) -> bool {
        false
    }

    /// Whether this bug is planted: never, without the feature `probe`.
    #[must_use]
    #[inline(always)]
    pub const fn is_bug_planted(_: Plant) -> bool {
        false
    }

    /// Counts one passage of a rare path: nothing, without the feature `probe`.
    #[inline(always)]
    pub const fn count_rare(_: Rare) {}
}

pub use state::*;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_lead_back() {
        for (i, plant) in Plant::ALL.iter().enumerate() {
            assert_eq!(Plant::from_name(plant.name()), Some(*plant));
            assert_eq!(*plant as usize, i);
        }
        for (i, rare) in Rare::ALL.iter().enumerate() {
            assert_eq!(Rare::from_name(rare.name()), Some(*rare));
            assert_eq!(*rare as usize, i);
        }
    }
}
